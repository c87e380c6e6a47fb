"""One engine on every rank, answering together: requests are dealt out, answers come back to all.

    prompts ─▶ dealt by expected cost ─┬─▶ rank 0: generate ─┬─▶ gathered, in the order given
                                       └─▶ rank 1: generate ─┘

While a rank generates it waits for nobody (unless the model is sharded: see `lock_step`); the ranks
meet once, at the end. An error on one of them is raised on all. What comes back does not depend on
how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime import all_ranks_or_none, rank, world_size
from .engine import Engine
from .live_model.lockstep import gathers_parameters, lockstep
from .requests.outputs import Completion, Score
from .requests.request_builder import Params, broadcast_params
from .requests.sampling_params import SamplingParams
from .requests.scoring import check_pairs
from .requests.tokenization import Prompt

Work = Callable[[list[int]], list[Any]]
"""Answers to the requests of these indices."""


class DataParallelEngine:
    """An engine's `generate` and `score`, shared out over the processes that train together."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        deadline: float | Sequence[float | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, all ranks together; every rank gets all completions."""
        each = broadcast_params(prompts, params, deadline=deadline)
        costs = [_size(prompt) + _new_tokens(own) for prompt, own, *_ in each]
        names = [repr(prompt) for prompt in prompts]

        def work(mine: list[int]) -> list[Completion]:
            own = [each[i] for i in mine]
            until = [seconds for *_, seconds in own]
            return self.engine.generate(
                [prompt for prompt, *_ in own], [params for _, params, *_ in own], deadline=until
            )

        return run_on_all_ranks(self._in_step(work), partition_by_cost(costs, world_size(), names))

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Any],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Score as `Engine.score`, all ranks together; a context's continuations stay together."""
        check_pairs(contexts, continuations)
        costs = [_size(c) + _size(after) for c, after in zip(contexts, continuations, strict=True)]

        def work(mine: list[int]) -> list[Score]:
            asked = [contexts[i] for i in mine], [continuations[i] for i in mine]
            return self.engine.score(*asked, deadline=deadline)

        names = [repr(context) for context in contexts]
        return run_on_all_ranks(self._in_step(work), partition_by_cost(costs, world_size(), names))

    def _in_step(self, work: Work) -> Work:
        """Where parameters are gathered in each forward, let no rank run one alone."""
        model = self.engine._model
        if world_size() == 1 or not gathers_parameters(model):
            return work

        def stepping(mine: list[int]) -> list[Any]:
            with lockstep(model):
                return work(mine) if mine else []

        return stepping


def partition_by_cost(
    costs: Sequence[float], ranks: int, names: Sequence[Any] | None = None
) -> list[list[int]]:
    """Share indices out so that the ranks' costs come out even; equal names stay on one rank.

    >>> deal([5, 1, 1, 4, 1], 2)
    [[0, 2], [1, 3, 4]]
    >>> deal([1, 1, 1], 2, ["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[Any, list[int]] = {}
    for index, name in enumerate(names if names is not None else range(len(costs))):
        groups.setdefault(name, []).append(index)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for group in sorted(groups.values(), key=lambda g: (-sum(costs[i] for i in g), g[0])):
        least = loads.index(min(loads))
        hands[least] += group
        loads[least] += sum(costs[i] for i in group)
    return [sorted(hand) for hand in hands]


def run_on_all_ranks(work: Work, shards: list[list[int]]) -> list[Any]:
    """Run each rank's shard of the indices; return all results in the order of the indices."""

    def own() -> list[Any]:
        results = work(shards[rank()])
        assert len(results) == len(shards[rank()])
        return results

    pairs = zip(shards, all_ranks_or_none(own), strict=True)
    by_index = {i: result for shard, own in pairs for i, result in zip(shard, own, strict=True)}
    return [by_index[i] for i in range(len(by_index))]


def _size(prompt: Any) -> float:
    """About how many tokens this is; letters count a quarter, what has no length one."""
    if isinstance(prompt, str):
        return len(prompt) / 4
    if isinstance(prompt, dict):
        return sum(_size(value) for value in prompt.values())
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return sum(_size(part) for part in prompt)
    try:
        return len(prompt)
    except TypeError:
        return 1


def _new_tokens(params: Any) -> int:
    if isinstance(params, SamplingParams):
        return params.max_tokens
    most = params.get("max_tokens") if isinstance(params, Mapping) else None
    return most if isinstance(most, int) else SamplingParams().max_tokens
