"""Prompts to requests: validated, limited and seeded.

    PromptSpec ─▶ EncodedPrompt ─▶ RequestGroup      one prompt at a time, while steps run

A fault of the call (an unknown parameter, text without a tokenizer, a wrong type) raises; a prompt
that the model or its cache cannot take fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from .batch_encoding import split_batch
from .draws import Draws, prompt_hash, stream_seed
from .output_processor import RequestGroup
from .request import Request
from .sampling_params import SamplingParams
from .tokenization import Prompt, RequestError, TokenizerAdapter, estimate_tokens

Params = SamplingParams | Mapping[str, Any] | None


class PromptSpec(NamedTuple):
    """A prompt with its own parameters, priority and seconds it may take."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    seconds: float


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, with what belongs to it; or the fault of this request alone."""

    prompt_index: int
    """Its position among the prompts of the call."""
    group_id: int
    """The numbers after it are those of its `n` requests."""
    token_ids: np.ndarray | None
    error: str | None
    params: SamplingParams
    stop_token_ids: frozenset[int]
    priority: int
    seconds: float


class RequestBuilder:
    """Build groups of requests, numbered in the order they arrive."""

    def __init__(
        self, tokenizer: TokenizerAdapter, seed: int, max_model_len: int, limit_reason: str = ""
    ):
        """Set the defaults; limit_reason: why `max_model_len` cannot be raised."""
        self.tokenizer = tokenizer
        self._seed = seed
        self._max_model_len = max_model_len
        self._limit_reason = limit_reason
        self._next_id = 0

    def encode(self, specs: Sequence[PromptSpec]) -> Iterator[EncodedPrompt]:
        """Check the parameters, then tokenize each prompt as it is asked for, in running order.

        A prompt that is a fault of the call raises ValueError.
        """
        self.tokenizer.check_batch([spec.prompt for spec in specs])
        checked = self._check_params({id(spec.params): spec.params for spec in specs})
        ids = [*accumulate((1 + spec.params.n for spec in specs), initial=self._next_id)]
        self._next_id, vocab_size = ids[-1], self.tokenizer.vocab_size

        def encode_one(index: int) -> EncodedPrompt:
            prompt, params, priority, seconds = specs[index]
            tokens = error = None
            try:
                tokens = self.tokenizer.encode(prompt, vocab_size=vocab_size)
            except RequestError as fault:
                error = str(fault)
            except ValueError as fault:
                raise ValueError(f"prompt {index}: {fault}") from None
            except Exception as fault:
                name = type(fault).__name__
                raise ValueError(f"prompt {index}: {name}: {fault}") from fault
            return EncodedPrompt(
                index, ids[index], tokens, error, *checked[id(params)], priority, seconds
            )

        return map(encode_one, running_order(specs, self._max_model_len))

    def _check_params(
        self, distinct: Mapping[int, SamplingParams]
    ) -> dict[int, tuple[SamplingParams, frozenset[int]]]:
        """The parameters for this model and the tokens that end a text, by the same keys."""
        if distinct:
            is_sampled = not all(params.is_greedy for params in distinct.values())
            self.tokenizer.check_generation_config(is_sampled)
        checked = {key: self.tokenizer.check_params(params) for key, params in distinct.items()}
        return {
            key: (params, self.tokenizer.stop_token_ids(params)) for key, params in checked.items()
        }

    def generation_requests(
        self,
        prompts: Iterable[EncodedPrompt],
        draws: Draws,
        now: float,
        cache_tokens: int,
        streaming: bool,
    ) -> Iterator[RequestGroup]:
        """Yield a group per prompt; cache_tokens: tokens that the KV cache holds."""
        for prompt in prompts:
            group = RequestGroup(prompt.group_id, self.tokenizer, streaming)
            group.prompt_token_ids = prompt.token_ids
            try:
                group.requests = self._samples(prompt, draws, now, cache_tokens, streaming)
            except RequestError as error:
                group.fail(str(error))
            yield group

    def _samples(
        self,
        prompt: EncodedPrompt,
        draws: Draws,
        now: float,
        cache_tokens: int,
        streaming: bool,
    ) -> list[Request]:
        """The `n` requests of one prompt."""
        ids, params = prompt.token_ids, prompt.params
        if ids is None:
            raise RequestError(prompt.error)
        max_len = self.max_len(len(ids), params.max_tokens, cache_tokens)
        if params.is_greedy:
            seeds = [0] * params.n  # nothing is drawn
        elif params.seed is None:
            seeds = [
                draws.seed(self._seed, prompt.prompt_index, sample) for sample in range(params.n)
            ]
        else:  # fixed, wherever the prompt is
            key = prompt_hash(ids)
            seeds = [stream_seed(params.seed, key, sample) for sample in range(params.n)]
        return [
            Request(
                id=request_id,
                prompt_token_ids=ids,
                max_len=max_len,
                params=params,
                seed=seed,
                priority=prompt.priority,
                deadline=now + prompt.seconds,
                stop_token_ids=prompt.stop_token_ids,
                score_from=None if params.prompt_logprobs is None else 1,
                needs_host_check=streaming or bool(params.stop) or params.logprobs is not None,
            )
            for request_id, seed in enumerate(seeds, prompt.group_id + 1)
        ]

    def max_len(self, prompt_len: int, max_tokens: int, cache_tokens: int) -> int:
        """Tokens a request may reach; RequestError if the model or the cache cannot hold it."""
        longest = self._max_model_len
        if prompt_len + (max_tokens > 0) > longest:
            way_out = "shorten it, or raise max_model_len if the model allows"
            if self._limit_reason:
                way_out = f"shorten it, since for this model {self._limit_reason}"
            raise RequestError(
                f"the prompt has {prompt_len} tokens and the engine's max_model_len is {longest}: "
                f"{way_out}"
            )
        max_len = min(prompt_len + max_tokens, longest)
        if max_len - 1 > cache_tokens:
            raise RequestError(
                f"prompt and max_tokens may reach {max_len} tokens, the cache holds "
                f"{cache_tokens}: lower max_tokens or give the engine more memory"
            )
        return max_len

    def new_id(self) -> int:
        """Number one more group or request."""
        self._next_id += 1
        return self._next_id - 1


def running_order(specs: Sequence[PromptSpec], max_model_len: int) -> list[int]:
    """Return the order to run prompts in: by priority, then the most new tokens, then the longest.

    A request takes a step per token: prompts of the others run in steps that the longest need
    anyway, and few steps at the end have few requests.
    """
    keys = []
    for prompt, params, priority, _ in specs:
        num_tokens = estimate_tokens(prompt)
        num_left = max_model_len - num_tokens
        keys.append((priority, -min(params.max_tokens, num_left), -num_tokens))
    return sorted(range(len(specs)), key=keys.__getitem__)


def broadcast_params(
    prompts: Sequence[Prompt] | Mapping[str, Any],
    params: Params | Sequence[Params],
    priority: int | Sequence[int] = 0,
    deadline: float | Sequence[float | None] | None = None,
) -> list[PromptSpec]:
    """Give every prompt its own parameters, priority and deadline; what is wrong raises."""
    prompts = split_batch("prompts", prompts)
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts is one {type(prompts).__name__}; pass a list of prompts")
    num_prompts = len(prompts)
    checked: dict[int, SamplingParams] = {}

    def convert(one: Any) -> SamplingParams:
        if id(one) not in checked:
            checked[id(one)] = to_sampling_params(one)
        return checked[id(one)]

    scalar = (SamplingParams, Mapping, type(None))
    all_params = _broadcast("params", params, num_prompts, scalar, convert)
    priorities = _broadcast("priority", priority, num_prompts, (Integral,), _check_priority)
    seconds = _broadcast("deadline", deadline, num_prompts, (Real, type(None)), deadline_seconds)
    return list(map(PromptSpec, prompts, all_params, priorities, seconds))


def to_sampling_params(params: Any) -> SamplingParams:
    """Return sampling parameters that may be given as a dict, or None for the defaults."""
    if isinstance(params, SamplingParams):
        return params
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        try:
            return SamplingParams(**params)
        except TypeError as error:
            raise ValueError(f"sampling parameters: {error}") from None
    raise ValueError(f"sampling parameters are a {type(params).__name__}; pass SamplingParams")


def deadline_seconds(deadline: Any) -> float:
    """Seconds that a deadline allows; None allows any time."""
    if deadline is None:
        return float("inf")
    if not isinstance(deadline, Real) or deadline != deadline:
        raise ValueError(f"deadline is {deadline!r}; pass {_EXPECTED['deadline']}")
    return float(deadline)


_EXPECTED = {
    "params": "SamplingParams or a dict",
    "priority": "a whole number",
    "deadline": "seconds or None",
}


def _check_priority(value: Any) -> Any:
    if not isinstance(value, Integral):
        raise ValueError(f"priority is {value!r}; pass {_EXPECTED['priority']}")
    return value


def _broadcast(
    name: str,
    value: Any,
    count: int,
    scalar_types: tuple[type, ...],
    convert: Callable[[Any], Any],
) -> list[Any]:
    """One converted value for each prompt; a single value is converted once."""
    if isinstance(value, scalar_types):
        return [convert(value)] * count
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise ValueError(f"{name} is {value!r}; pass {_EXPECTED[name]}, or one for each prompt")
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts; pass one, or one for each")
    return [convert(one) for one in list(value)]
