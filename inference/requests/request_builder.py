"""Requests from what callers give: checked, limited, seeded; a bad one is refused alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from .request import Request
from .request_group import RequestGroup
from .rng import stream_seed
from .sampling_params import SamplingParams
from .scoring import ScoreJob
from .tokenization import Prompt, TokenizerAdapter, identity

Params = SamplingParams | Mapping[str, Any] | None
PromptSpec = tuple[Prompt, Params, int, float | None]
"""A prompt, its parameters, priority and deadline."""


class RequestBuilder:
    """Make groups of requests, numbered as they come."""

    def __init__(self, tongue: TokenizerAdapter, seed: int, max_model_len: int):
        self._tongue = tongue
        self._seed = seed
        self._max_model_len = max_model_len
        self._next = 0

    def generation_requests(
        self,
        asked: Sequence[PromptSpec],
        now: float,
        room: int,
        streaming: bool,
        twins: Counter[int] | None = None,
    ) -> list[RequestGroup]:
        """One group a prompt.

        room: tokens the cache holds.
        twins: how often each prompt was given before, and is to be answered anew; counted on.
        """
        twins = Counter() if twins is None else twins
        checked: dict[int, SamplingParams] = {}  # by identity: most often all get the same
        groups = []
        for prompt, params, priority, deadline in asked:
            group = RequestGroup(self._number(), self._tongue, streaming)
            try:
                if id(params) not in checked:
                    checked[id(params)] = self._tongue.check_params(params)
                how = checked[id(params)], priority, now + seconds(deadline)
                group.requests = self._requests(prompt, *how, room, twins, streaming)
            except ValueError as error:
                group.refuse(str(error))
            groups.append(group)
        return groups

    def scoring_requests(
        self, jobs: Sequence[ScoreJob], until: float, room: int
    ) -> list[RequestGroup]:
        """One group a job."""
        groups = []
        for job in jobs:
            group = RequestGroup(self._number(), self._tongue, streaming=False)
            try:
                if isinstance(job, str):
                    raise ValueError(job)
                ids, first = job
                limit = self._fit(len(ids), 0, room)
                params = SamplingParams()
                group.requests = [
                    Request(self._number(), ids, limit, params, deadline=until, score_from=first)
                ]
            except ValueError as error:
                group.refuse(str(error))
            groups.append(group)
        return groups

    def _requests(
        self,
        prompt: Prompt,
        settings: SamplingParams,
        priority: int,
        until: float,
        room: int,
        twins: Counter[int],
        streaming: bool,
    ) -> list[Request]:
        """The `n` requests of one prompt."""
        if not isinstance(priority, Integral):
            raise ValueError(f"priority is {priority!r}; give {_GIVE['priority']}")
        ids = self._tongue.encode(prompt)
        limit = self._fit(len(ids), settings.max_tokens, room)
        ends = self._tongue.stop_ids(settings)
        if settings.min_tokens and len(ends) >= self._tongue.vocabulary:
            raise ValueError(
                f"min_tokens is {settings.min_tokens}, but every token ends the text: "
                "name fewer stop_token_ids"
            )
        who = identity(ids)
        # Without a seed of its own, the same prompt given twice is to be answered twice.
        salt = 0 if settings.seed is not None else twins[who] << 16
        twins[who] += 1
        seed = self._seed if settings.seed is None else settings.seed
        return [
            Request(
                id=self._number(),
                prompt=ids,
                limit=limit,
                params=settings,
                seed=stream_seed(seed, who, salt + sample_index),
                priority=priority,
                deadline=until,
                stop_ids=ends,
                score_from=None if settings.prompt_logprobs is None else 1,
                watched=streaming or bool(settings.stop) or settings.logprobs is not None,
            )
            for sample_index in range(settings.n)
        ]

    def _fit(self, prompt: int, new: int, room: int) -> int:
        """Tokens a request may reach; ValueError where model or cache cannot hold it."""
        longest = self._max_model_len
        if prompt + (new > 0) > longest:
            raise ValueError(
                f"the prompt has {prompt} tokens and the engine's max_model_len is {longest}: "
                "shorten it, or raise max_model_len if the model allows"
            )
        limit = min(prompt + new, longest)
        if limit - 1 > room:
            raise ValueError(
                f"prompt and max_tokens may reach {limit} tokens, the cache holds {room}: "
                "lower max_tokens or give the engine more memory"
            )
        return limit

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def broadcast_params(
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params],
    priority: int | Sequence[int] = 0,
    deadline: float | Sequence[float | None] | None = None,
) -> list[PromptSpec]:
    """Give every prompt its own parameters, priority and deadline."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts is one {type(prompts).__name__}; give a list of prompts")
    each = _for_each("params", params, len(prompts), (SamplingParams, Mapping, type(None)))
    priorities = _for_each("priority", priority, len(prompts), (Integral,))
    deadlines = _for_each("deadline", deadline, len(prompts), (Real, type(None)))
    return list(zip(prompts, each, priorities, deadlines, strict=True))


def seconds(deadline: Any) -> float:
    """The seconds a deadline leaves; None leaves all there are."""
    if deadline is None:
        return float("inf")
    if not isinstance(deadline, Real) or deadline != deadline:
        raise ValueError(f"deadline is {deadline!r}; give {_GIVE['deadline']}")
    return float(deadline)


_GIVE = {
    "params": "SamplingParams or a dict",
    "priority": "a whole number",
    "deadline": "seconds or None",
}


def _for_each(name: str, value: Any, count: int, single: tuple[type, ...]) -> list[Any]:
    if isinstance(value, single):
        return [value] * count
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise ValueError(f"{name} is {value!r}; give {_GIVE[name]}, or one for each prompt")
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts; give one, or one for each")
    return list(value)
