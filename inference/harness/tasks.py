"""lm-evaluation-harness on a live model: its tasks, its prompts and its metrics, our engine.

    tasks ─▶ requests ─▶ EngineLM ─▶ DataParallelEngine ─▶ Engine ─▶ answers ─▶ metrics

`EngineLM` answers what lm_eval asks a model, as its own `hf` model does: the same token borders,
the same windows and stop strings, so the same scores. `Harness` holds tasks ready and evaluates
them whenever it is called, also between two training steps: no seed is set, no cache is written.
All ranks see all requests and share the work out by themselves.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from numbers import Integral, Real
from pathlib import Path
from typing import Any

try:
    from lm_eval import evaluator
except ImportError:
    raise ImportError("lm-eval is not installed: pip install 'nopad[eval]'") from None
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...runtime import preserve_rng, unwrap_model
from ..data_parallel import DataParallelEngine
from ..engine import Engine
from ..requests.sampling_params import SamplingParams
from .gen_kwargs import settle

log = logging.getLogger(__name__)

FEWSHOT_SEED = 1234
"""What lm_eval draws few-shot examples with; a generator of its own, not the trainer's."""
_NEW_TOKENS = 256


class EngineLM(TemplateLM):
    """A live model as lm_eval sees one."""

    def __init__(
        self, model: Any, tokenizer: Any, *, max_length: int | None = None, **settings: Any
    ):
        """settings: of the engine, see `Engine`."""
        super().__init__()
        self.model: Any = unwrap_model(model)
        self.tokenizer = tokenizer
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a bos nor an eos token, and texts are scored from one "
                "on: name one, tokenizer.eos_token = ..."
            )
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}; it must be tokens from 1")
        self.max_length: int = max_length or resolve_max_length(self.model.config, tokenizer)
        # The last token of a text is scored but never run, so one more than the positions fits.
        self.engine = Engine(self.model, tokenizer, max_model_len=self.max_length + 1, **settings)
        self._ranks = DataParallelEngine(self.engine)
        self._until = float("inf")
        self._left_out = False
        """Whether it was said that system messages are."""

    def finish_by(self, moment: float) -> None:
        """Raise TimeoutError from here on where an answer is not there by this `time.monotonic`."""
        self._until = moment

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        start = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is None and has_bos_prefix(string, start):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

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
            if not self._left_out:
                log.warning("the chat template takes no system message, left out: %s", error)
            self._left_out = True
            return text

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self._generation(*request.args) for request in requests]
        prompts, params = [a[0] for a in asked], [a[1] for a in asked]
        answers = self._ranks.generate(prompts, params, deadline=self._left())
        texts = []
        for number, (answer, (_, _, until)) in enumerate(zip(answers, asked, strict=True)):
            self._check(number, "deadline" if answer.finish_reason == "deadline" else answer.error)
            text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", requests[number].args, texts[-1])
        return texts

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            own = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(pair)) for pair in own]
            windows += pairs
            counts.append(len(pairs))
        found = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(found)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context and a pair that come again are computed once."""
        wanted: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        places = []
        for _, context, continuation in requests:
            before, after = self._cut(context, continuation)
            own = wanted.setdefault(before, {})
            places.append((before, own.setdefault(after, len(own))))
        contexts = [list(before) for before in wanted]
        asked = [[list(after) for after in own] for own in wanted.values()]
        scores = self._ranks.score(contexts, asked, deadline=self._left())
        by_context = dict(zip(wanted, scores, strict=True))
        answers = []
        for number, ((text, _, _), (before, place)) in enumerate(
            zip(requests, places, strict=True)
        ):
            score = by_context[before][place]
            self._check(number, score.error)
            answers.append((score.logprob, score.is_greedy))
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answers[-1])
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[tuple, tuple]:
        """Cut from the left what is longer than the model allows."""
        if not continuation or len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens; from 1 to {self.max_length} can "
                "be scored"
            )
        room = self.max_length + 1 - len(continuation)
        return tuple(context[-room:]), tuple(continuation)

    def _generation(self, context: str, settings: dict) -> tuple[list[int], Any, list[str]]:
        """What one request asks for: the prompt's ids, how to continue it, and where to cut."""
        wishes: dict[str, Any] = {**normalize_gen_kwargs(settings, _NEW_TOKENS)}
        end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(wishes.pop("until", None), eos=end)
        new = wishes.pop("max_gen_toks")
        defaults = getattr(self.model, "generation_config", None)
        settled = settle(wishes, defaults)
        room = self.max_length - new
        if room < 1:
            raise ValueError(
                f"max_gen_toks is {new} and the model's length {self.max_length}: lower it"
            )
        bos = getattr(self.tokenizer, "bos_token", None)
        extra = {"add_special_tokens": False} if has_bos_prefix(context, bos) else {}
        ids = self.tokenizer(context, **extra)["input_ids"][-room:]
        # Set by the model, it wins over what the task asks for, as it does in `generate`.
        most = min(getattr(defaults, "max_new_tokens", None) or new, self.max_length - len(ids))
        stop = [text for text in until if text]
        params = SamplingParams(max_tokens=most, stop=stop, **settled)
        return ids, params, until

    def _left(self) -> float | None:
        return None if self._until == float("inf") else max(self._until - time.monotonic(), 0.0)

    def _check(self, number: int, error: str | None) -> None:
        if error is None:
            return
        if "deadline" in error:
            raise TimeoutError(f"no time left at request {number}: lower the limit of the tasks")
        raise ValueError(f"request {number}: {error}")


class Harness:
    """Tasks of lm_eval, ready to be evaluated on a live model whenever it is called.

    harness = Harness(model, tokenizer, ["arc_easy"], limit=200)
    harness()  # {'arc_easy/acc': 0.41, 'arc_easy/acc_norm': 0.38, ...}
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tasks: Sequence[Any],
        *,
        limit: int | float | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
        system_instruction: str | None = None,
        gen_kwargs: Mapping[str, Any] | None = None,
        include_path: str | None = None,
        task_manager: TaskManager | None = None,
        **settings: Any,
    ):
        """Load the tasks.

        limit: documents of each task, or a share of them.
        chat: put prompts into the tokenizer's chat template.
        system_instruction: what stands before every prompt, or speaks as the system in a chat.
        gen_kwargs: settings of generation that take the place of the tasks' own; of most tasks a
            temperature is heard with do_sample=True only.
        include_path: folder with task files of your own.
        task_manager: what knows the tasks already, as `find_tasks` gives it.
        settings: of `EngineLM` and the engine.
        """
        _check(tasks, limit, num_fewshot, gen_kwargs)
        if chat and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("chat is on, but the tokenizer has no chat template")
        manager = task_manager or find_tasks(tasks, include_path)
        self.lm = EngineLM(model, tokenizer, **settings)
        self._limit, self._chat, self._system = limit, chat, system_instruction
        self._device = next(self.lm.model.parameters()).device
        with preserve_rng(self._device):
            # lm_eval writes into dicts that it is given.
            given = [deepcopy(task) if isinstance(task, dict) else task for task in tasks]
            self._tasks = manager.load(given)
        for name, task in self._tasks["tasks"].items():
            own = task.get_config("num_fewshot")
            if own is None or (num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=int(num_fewshot or 0))
            if task.get_config("output_type") == "generate_until":
                self._settle(name, task, gen_kwargs or {})

    def _settle(self, name: str, task: Any, gen_kwargs: Mapping[str, Any]) -> None:
        """Set how a task generates, seen to be what the engine does."""
        settings = {**task.get_config("generation_kwargs"), **gen_kwargs}
        try:
            self.lm._generation("", settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        task.set_config("generation_kwargs", settings)

    @property
    def engine(self) -> Engine:
        """The engine, to be shared with other evaluations."""
        return self.lm.engine

    def __call__(self, deadline: float | None = None) -> dict[str, float]:
        """Evaluate; return every metric of every task and group.

        deadline: seconds after which TimeoutError is raised.
        """
        results = self.results(deadline)["results"]
        return {
            f"{task}/{_plain(name)}": float(value)
            for task, values in results.items()
            for name, value in values.items()
            if _is_number(value)
        }

    def results(self, deadline: float | None = None, samples: bool = False) -> dict[str, Any]:
        """Evaluate; return what `lm_eval` returns, with every sample if wanted."""
        self.lm.finish_by(float("inf") if deadline is None else time.monotonic() + deadline)
        with preserve_rng(self._device), _in_this_process():
            for task in self._tasks["tasks"].values():
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
            found = evaluator.evaluate(
                lm=self.lm,
                task_dict=self._tasks,
                limit=self._limit,  # pyright: ignore[reportArgumentType]
                log_samples=samples,
                system_instruction=self._system,
                apply_chat_template=self._chat,
                fewshot_as_multiturn=self._chat,
                bootstrap_iters=1000,
            )
        assert found is not None
        return dict(found)


def find_tasks(tasks: Sequence[Any], include_path: str | None = None) -> TaskManager:
    """Know these tasks, or say which one there is not.

    lm_eval's own thousands are looked through only where one of them is wanted.
    """
    names = [task for task in tasks if isinstance(task, str)]
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path: there is no folder {include_path}")
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if all(name in own.task_index for name in names):
            return own
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            near = difflib.get_close_matches(name, list(manager.task_index), 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists all"
            raise ValueError(f"there is no task {name!r}: {hint}")
    return manager


def _check(tasks: Any, limit: Any, num_fewshot: Any, gen_kwargs: Any) -> None:
    """Refuse what is no choice of tasks, documents or settings."""
    if isinstance(tasks, str) or len(tasks) == 0:
        raise ValueError(f"tasks is {tasks!r}; name them in a list, at least one: ['arc_easy']")
    whole_or_share = _is_number(limit) and (0 < limit < 1 or (limit >= 1 and limit % 1 == 0))
    if limit is not None and not whole_or_share:
        raise ValueError(f"limit is {limit!r}; give documents from 1, or a share of them below 1")
    counted = isinstance(num_fewshot, Integral) and int(num_fewshot) >= 0
    if num_fewshot is not None and not counted:
        raise ValueError(f"num_fewshot is {num_fewshot!r}; give examples from 0")
    if gen_kwargs is not None and not isinstance(gen_kwargs, Mapping):
        raise ValueError(f"gen_kwargs is {gen_kwargs!r}; give a dict: {{'max_gen_toks': 64}}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Let lm_eval draw for its standard errors here, and what it prints go to stderr.

    It would fork as many processes as there are cores, each with the trainer's threads, its device
    and its handlers of signals: a child that takes SIGTERM for a wish to stop never ends.
    """
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.environ.pop("DISABLE_MULTIPROC", None)
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


def _plain(name: str) -> str:
    """Leave the filter out where there is none.

    >>> _plain("acc,none"), _plain("exact_match,strict-match")
    ('acc', 'exact_match_strict-match')
    """
    return name.removesuffix(",none").replace(",", "_")
