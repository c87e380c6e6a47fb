"""`EngineLM`: a live model behind lm_eval's model interface.

It answers requests as lm_eval's own `hf` model does: the same token boundaries, scoring windows and
stop strings, so the same scores. Every rank gets all requests, and the ranks divide the work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
except ImportError:
    raise ImportError("lm-eval is not installed: pip install lm-eval") from None
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...runtime import unwrap_model
from ..data_parallel import DataParallelEngine
from ..engine import Engine
from ..requests.generation_config import check_generation_config
from ..requests.sampling_params import SamplingParams
from ..settings import check_positive

log = logging.getLogger(__name__)

_DEFAULT_MAX_GEN_TOKS = 256
_SUPPORTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50
"""`generate` samples from the top 50 if neither the task nor the model gives a top_k."""


class EngineLM(TemplateLM):
    """A live model as lm_eval sees one."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        **settings: Any,
    ):
        """Build an engine on the model.

        Args:
            model: the model in training, or any causal LM of Transformers.
            tokenizer: the model's tokenizer.
            max_length: longest sequence; default: what the model's config or tokenizer says.
            add_bos_token: whether prompts get the tokenizer's special tokens, except those that
                begin with one; default: as the tokenizer does.
            settings: arguments of `Engine`.
        """
        super().__init__()
        self.model: Any = unwrap_model(model)
        self.tokenizer = tokenizer
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a bos nor an eos token, but scoring starts each text "
                "with one: set tokenizer.eos_token = ..."
            )
        default = resolve_max_length(self.model.config, tokenizer)
        self.max_length = check_positive("max_length", max_length, default)
        # The last token of a text is scored but never run, so one more than the positions fits.
        self.engine = Engine(self.model, tokenizer, max_model_len=self.max_length + 1, **settings)
        self._data_parallel = DataParallelEngine(self.engine)
        self._special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
        self._deadline = float("inf")
        self._warned_of_system = False

    def set_deadline(self, deadline: float) -> None:
        """Raise TimeoutError for requests unfinished at this `deadline`, by `time.monotonic()`."""
        self._deadline = deadline

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is not None:
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return self._encode(string, self.tokenizer.decode([self.prefix_token_id]))

    def _encode(self, text: str, bos: str | None) -> list[int]:
        """Encode a text with the tokenizer's special tokens, unless it begins with `bos`."""
        special = {"add_special_tokens": False} if has_bos_prefix(text, bos) else self._special
        return self.tokenizer.encode(text, **special)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except Exception as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            text = self.tokenizer.apply_chat_template(rest, **options)
            if not self._warned_of_system:
                log.warning("the chat template refuses system messages; omitting them: %s", error)
            self._warned_of_system = True
            return text

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        specs = [self.generation_request(*request.args) for request in requests]
        tokens = self._generate_tokens([spec[:2] for spec in specs])
        texts = []
        for request, ids, (_, _, until) in zip(requests, tokens, specs, strict=True):
            text = self._decode(self._end_as_hf(ids, until))
            texts.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generate_tokens(
        self, specs: Sequence[tuple[list[int], SamplingParams]]
    ) -> list[list[int]]:
        """Generate until a stop string is in the text of the new tokens alone, as `hf` does.

        The engine looks for it in their text after the prompt. SentencePiece-like tokenizers omit
        the space at the beginning of a text: if that ended a request, generation continues.
        """
        outputs: list[list[int]] = [[] for _ in specs]
        unfinished = [*range(len(specs))]
        while unfinished:
            prompts = [[*specs[i][0], *outputs[i]] for i in unfinished]
            params = [
                replace(specs[i][1], max_tokens=specs[i][1].max_tokens - len(outputs[i]))
                for i in unfinished
            ]
            left = self._seconds_left()
            completions = self._data_parallel.generate(prompts, params, deadline=left)
            for index, completion in zip(unfinished, completions, strict=True):
                is_late = completion.finish_reason == "deadline"
                self._raise_error(index, "deadline" if is_late else completion.error)
                outputs[index] += completion.token_ids
            unfinished = [
                index
                for index, completion in zip(unfinished, completions, strict=True)
                if completion.finish_reason == "stop"
                and not self._is_complete(outputs[index], specs[index][1])
            ]
        return outputs

    def _is_complete(self, token_ids: list[int], params: SamplingParams) -> bool:
        """Whether new tokens that the engine stopped at are an answer."""
        if len(token_ids) >= params.max_tokens:
            return True
        adapter = self.engine._tokenizer
        if token_ids[-1] in adapter.stop_token_ids(adapter.check_params(params)):
            return True
        text = self._decode(token_ids)
        return any(stop in text for stop in params.stop)

    def _end_as_hf(self, token_ids: list[int], until: list[str]) -> list[int]:
        """Cut new tokens at a stop string that contains special tokens, or a part of one's name.

        `hf` looks for stop strings in the last few tokens, with the names of special ones; text
        does not show these.
        """
        if self.tokenizer.decode(token_ids[:-1]) == self._decode(token_ids[:-1]):
            return token_ids
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        lengths = {stop: len(encode(stop, add_special_tokens=False)) + 2 for stop in until}
        for end in range(1, len(token_ids)):
            ends = ((stop, max(0, end - length)) for stop, length in lengths.items())
            if any(stop in decode(token_ids[start:end]) for stop, start in ends):
                return token_ids[:end]
        return token_ids

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(pair)) for pair in rolling]
            windows += pairs
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; repeated contexts and repeated pairs are computed once."""
        unique: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        """The continuations of each context, and the index of each."""
        keys = []
        for _, context, continuation in requests:
            before, after = self._truncate(context, continuation)
            indices = unique.setdefault(before, {})
            keys.append((before, indices.setdefault(after, len(indices))))
        contexts = [list(before) for before in unique]
        continuations = [[list(after) for after in indices] for indices in unique.values()]
        scores = self._data_parallel.score(contexts, continuations, deadline=self._seconds_left())
        by_context = dict(zip(unique, scores, strict=True))
        results = []
        for number, ((text, _, _), (before, index)) in enumerate(zip(requests, keys, strict=True)):
            score = by_context[before][index]
            self._raise_error(number, score.error)
            results.append((score.logprob, score.is_greedy))
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, results[-1])
        return results

    def _truncate(self, context: list[int], continuation: list[int]) -> tuple[tuple, tuple]:
        """Truncate a context from the left to the model's length."""
        if not continuation or len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens; it must have from 1 to "
                f"{self.max_length}"
            )
        max_context = self.max_length + 1 - len(continuation)
        return tuple(context[-max_context:]), tuple(continuation)

    def generation_request(
        self, context: str, gen_kwargs: dict
    ) -> tuple[list[int], SamplingParams, list[str]]:
        """Return the prompt's ids, its sampling parameters and the strings that end its text.

        Args:
            context: the prompt.
            gen_kwargs: lm_eval's settings of the request, such as `until` and `max_gen_toks`.
        """
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, _DEFAULT_MAX_GEN_TOKS)}
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        max_gen_toks = kwargs.pop("max_gen_toks")
        generation_config = getattr(self.model, "generation_config", None)
        sampling_kwargs = to_sampling_kwargs(kwargs, generation_config)
        max_prompt = self.max_length - max_gen_toks
        if max_prompt < 1:
            raise ValueError(
                f"max_gen_toks is {max_gen_toks}, which leaves no tokens for the prompt within "
                f"the model's length of {self.max_length}: lower it"
            )
        # `hf` looks for the bos token here, and where it scores also for an eos in its place.
        ids = self._encode(context, getattr(self.tokenizer, "bos_token", None))[-max_prompt:]
        # The model's max_new_tokens overrides the task's limit, as it does in `generate`.
        max_tokens = getattr(generation_config, "max_new_tokens", None) or max_gen_toks
        # An empty stop string is in every text, so the first token ends it.
        max_tokens = 1 if "" in until else min(max_tokens, self.max_length - len(ids))
        stop = [text for text in until if text]
        return ids, SamplingParams(max_tokens=max_tokens, stop=stop, **sampling_kwargs), until

    def _seconds_left(self) -> float | None:
        if self._deadline == float("inf"):
            return None
        return max(self._deadline - time.monotonic(), 0.0)

    def _raise_error(self, index: int, error: str | None) -> None:
        if error is None:
            return
        if "deadline" in error:
            raise TimeoutError(f"no time left at request {index}: lower the limit of the tasks")
        raise ValueError(f"request {index}: {error}")


def to_sampling_kwargs(gen_kwargs: dict[str, Any], generation_config: Any) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for a task's generation settings.

    lm_eval's own `hf` model calls `generate`, which takes settings that the task does not give from
    the model's generation_config. Doing the same here gives the same answers. A setting that the
    engine does not support is refused by name, in the task as in the generation_config.

    gen_kwargs: settings of the task, without stop strings and token limit.
    generation_config: the model's, or None.

    >>> to_sampling_kwargs({"do_sample": False, "temperature": 0.0}, None)
    {'temperature': 0.0}
    >>> to_sampling_kwargs({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, None)
    {'top_k': 50, 'temperature': 0.7, 'top_p': 0.9}
    """
    gen_kwargs = {"temperature": 0.0, **gen_kwargs}
    gen_kwargs.pop("do_sample", None)
    if (beams := gen_kwargs.pop("num_beams", 1)) != 1:
        raise ValueError(f"num_beams is {beams}: beam search is not supported; set it to 1")
    unknown = set(gen_kwargs) - set(_SUPPORTED)
    if unknown:
        raise ValueError(
            f"generation setting {sorted(unknown)[0]!r} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}"
        )
    is_sampled = gen_kwargs["temperature"] != 0
    check_generation_config(generation_config, is_sampled)
    defaults = {"top_k": _DEFAULT_TOP_K} if is_sampled else {}
    for name in _SUPPORTED if is_sampled else ("repetition_penalty",):
        if (value := getattr(generation_config, name, None)) is not None:
            defaults[name] = value
    return {**defaults, **gen_kwargs}
