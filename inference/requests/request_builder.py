"""Prompts to requests: validated, limited and seeded; an invalid prompt fails alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from .request import Request
from .request_group import RequestGroup
from .rng import stream_seed
from .sampling_params import SamplingParams
from .scoring import ScoreJob
from .tokenization import Prompt, TokenizerAdapter, prompt_hash

Params = SamplingParams | Mapping[str, Any] | None


class PromptSpec(NamedTuple):
    """A prompt with its own parameters, priority and deadline in seconds."""

    prompt: Prompt
    params: Params
    priority: int
    deadline: float | None


class RequestBuilder:
    """Build groups of requests, numbered in the order they arrive."""

    def __init__(
        self, tokenizer: TokenizerAdapter, seed: int, max_model_len: int, limit_reason: str = ""
    ):
        """Set the defaults; limit_reason: why `max_model_len` cannot be raised."""
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_model_len = max_model_len
        self._limit_reason = limit_reason
        self._next_id = 0

    def generation_requests(
        self,
        specs: Sequence[PromptSpec],
        now: float,
        cache_tokens: int,
        streaming: bool,
        repeats: Counter[int] | None = None,
    ) -> list[RequestGroup]:
        """One group per prompt.

        cache_tokens: tokens that the KV cache holds.
        repeats: how often each prompt was submitted before; repeats are sampled differently, and
            counted here.
        """
        repeats = Counter() if repeats is None else repeats
        checked: dict[int, SamplingParams] = {}  # by object: prompts usually share their params
        groups = []
        for prompt, params, priority, deadline in specs:
            group = RequestGroup(self._new_id(), self._tokenizer, streaming)
            try:
                group.prompt_token_ids = ids = self._tokenizer.encode(prompt)
                if id(params) not in checked:
                    checked[id(params)] = self._tokenizer.check_params(params)
                expires = now + deadline_seconds(deadline)
                if not isinstance(priority, Integral):
                    raise ValueError(f"priority is {priority!r}; pass {_EXPECTED['priority']}")
                max_len = self._max_len(len(ids), checked[id(params)].max_tokens, cache_tokens)
                group.requests = self._samples(
                    ids, max_len, checked[id(params)], priority, expires, repeats, streaming
                )
            except ValueError as error:
                group.fail(str(error))
            groups.append(group)
        return groups

    def scoring_requests(
        self, jobs: Sequence[ScoreJob], expires: float, cache_tokens: int
    ) -> list[RequestGroup]:
        """One group per job."""
        groups = []
        for job in jobs:
            group = RequestGroup(self._new_id(), self._tokenizer, streaming=False)
            try:
                if isinstance(job, str):
                    raise ValueError(job)
                ids, score_from = job
                max_len = self._max_len(len(ids), 0, cache_tokens)
                request = Request(
                    self._new_id(),
                    ids,
                    max_len,
                    SamplingParams(),
                    deadline=expires,
                    score_from=score_from,
                )
                group.requests = [request]
            except ValueError as error:
                group.fail(str(error))
            groups.append(group)
        return groups

    def _samples(
        self,
        ids: np.ndarray,
        max_len: int,
        params: SamplingParams,
        priority: int,
        expires: float,
        repeats: Counter[int],
        streaming: bool,
    ) -> list[Request]:
        """The `n` requests of one prompt."""
        stop_token_ids = self._tokenizer.stop_token_ids(params)
        if params.min_tokens and len(stop_token_ids) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but every token ends the text: "
                "name fewer stop_token_ids"
            )
        key = prompt_hash(ids)
        # Without a seed of its own, a prompt submitted twice gets two different samples.
        salt = 0 if params.seed is not None else repeats[key] << 16
        repeats[key] += 1
        seed = self._seed if params.seed is None else params.seed
        return [
            Request(
                id=self._new_id(),
                prompt_token_ids=ids,
                max_len=max_len,
                params=params,
                seed=stream_seed(seed, key, salt + sample_index),
                priority=priority,
                deadline=expires,
                stop_token_ids=stop_token_ids,
                score_from=None if params.prompt_logprobs is None else 1,
                needs_host_check=streaming or bool(params.stop) or params.logprobs is not None,
            )
            for sample_index in range(params.n)
        ]

    def _max_len(self, prompt_len: int, max_tokens: int, cache_tokens: int) -> int:
        """Tokens a request may reach; ValueError if the model or the cache cannot hold it."""
        longest = self._max_model_len
        if prompt_len + (max_tokens > 0) > longest:
            way_out = "shorten it, or raise max_model_len if the model allows"
            if self._limit_reason:
                way_out = f"shorten it, since for this model {self._limit_reason}"
            raise ValueError(
                f"the prompt has {prompt_len} tokens and the engine's max_model_len is {longest}: "
                f"{way_out}"
            )
        max_len = min(prompt_len + max_tokens, longest)
        if max_len - 1 > cache_tokens:
            raise ValueError(
                f"prompt and max_tokens may reach {max_len} tokens, the cache holds "
                f"{cache_tokens}: lower max_tokens or give the engine more memory"
            )
        return max_len

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def broadcast_params(
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params],
    priority: int | Sequence[int] = 0,
    deadline: float | Sequence[float | None] | None = None,
) -> list[PromptSpec]:
    """Give every prompt its own parameters, priority and deadline."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts is one {type(prompts).__name__}; pass a list of prompts")
    num_prompts = len(prompts)
    all_params = _broadcast("params", params, num_prompts, (SamplingParams, Mapping, type(None)))
    priorities = _broadcast("priority", priority, num_prompts, (Integral,))
    deadlines = _broadcast("deadline", deadline, num_prompts, (Real, type(None)))
    columns = zip(prompts, all_params, priorities, deadlines, strict=True)
    return [PromptSpec(*values) for values in columns]


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


def _broadcast(name: str, value: Any, count: int, scalar_types: tuple[type, ...]) -> list[Any]:
    if isinstance(value, scalar_types):
        return [value] * count
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise ValueError(f"{name} is {value!r}; pass {_EXPECTED[name]}, or one for each prompt")
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts; pass one, or one for each")
    return list(value)
