"""Data-parallel generation and scoring: one engine per rank, every rank gets all results.

    prompts ─▶ partitioned by cost ─┬─▶ rank 0: generate ─┬─▶ gathered, in the order of the prompts
                                    └─▶ rank 1: generate ─┘

While it generates, a rank waits for no other (unless the model is sharded: see
`live_model/lockstep.py`); the ranks synchronize once, at the end. An error on one of them is raised
on all. The results do not depend on the number of ranks. Ranks that share a model by tensor
parallelism run the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..runtime import all_ranks_or_none, gather_objects, rank, world_size
from .engine import Engine
from .live_model.lockstep import gathers_parameters, lockstep
from .live_model.model_lock import model_lock
from .live_model.replica import replica_ranks
from .requests.draws import shared_draws
from .requests.outputs import Completion, Score
from .requests.prompt_spec import Params, broadcast_params
from .requests.scoring import check_pairs
from .requests.tokenizer_adapter import Prompt, estimate_tokens

Work = Callable[[list[int]], list[Any]]
"""From the indices of a rank's requests to their results."""


class DataParallelEngine:
    """An engine's `generate` and `score`, distributed over the ranks that train together.

    Args:
        engine: this rank's engine; every rank makes one on its own copy or shard of the model.
    """

    def __init__(self, engine: Engine):
        if not isinstance(engine, Engine):
            raise ValueError(f"engine is a {type(engine).__name__}; pass an Engine")
        self.engine = engine
        self._lock = model_lock(engine._model)

    def generate(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        params: Params | Sequence[Params] = None,
        *,
        deadline: float | Sequence[float | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, on all ranks; every rank gets all completions.

        Args:
            prompts: the same on every rank, as in `Engine.generate`.
            params: sampling parameters, one for all prompts or one for each.
            deadline: seconds after which requests return the tokens they have; one for all prompts
                or one for each.
        """
        specs = broadcast_params(prompts, params, deadline=deadline)
        prompts = [spec.prompt for spec in specs]
        self.engine._tokenizer.check_batch(prompts)  # of a part, fewer rows may show the padding
        costs = [estimate_tokens(spec.prompt) + spec.params.max_tokens for spec in specs]
        draws = shared_draws()

        def work(indices: list[int]) -> list[Completion]:
            own = [specs[i] for i in indices]
            return self.engine.generate(
                [spec.prompt for spec in own],
                [spec.params for spec in own],
                deadline=[spec.seconds for spec in own],
                _draws=replace(draws, indices=indices),
            )

        return self._run(work, costs, prompts)

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Any],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Score as `Engine.score`, on all ranks; a context's continuations stay on one rank.

        Args:
            contexts: the same on every rank.
            continuations: one for each context, or a list of them.
            deadline: seconds after which the scores of unfinished requests have an error.
        """
        contexts, continuations = check_pairs(contexts, continuations)
        pairs = zip(contexts, continuations, strict=True)
        costs = [estimate_tokens(context) + estimate_tokens(after) for context, after in pairs]

        def work(indices: list[int]) -> list[Score]:
            own_contexts = [contexts[i] for i in indices]
            own_continuations = [continuations[i] for i in indices]
            return self.engine.score(own_contexts, own_continuations, deadline=deadline)

        return self._run(work, costs, contexts)

    def _run(self, work: Work, costs: list[float], prompts: Sequence[Prompt]) -> list[Any]:
        """Run on all ranks; equal prompts stay on one rank, where they share their prefix."""
        keys = [repr(prompt) for prompt in prompts]
        has_others = world_size() > 1
        # Two threads would meet the other ranks in any order, so the second one cannot wait here.
        if has_others and not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread generates on all ranks: make these calls one after the other, in "
                "the same order on every rank"
            )
        try:
            replicas = replica_of_ranks(self.engine._model)
            shards = partition_by_cost(costs, max(replicas) + 1, keys)
            return run_on_all_ranks(self._in_lockstep(work), [shards[r] for r in replicas])
        finally:
            if has_others:
                self._lock.release()

    def _in_lockstep(self, work: Work) -> Work:
        """If forwards gather parameters (FSDP2), make all ranks run every forward together."""
        model = self.engine._model
        if world_size() == 1 or not gathers_parameters(model.modules()):
            return work

        def lockstep_work(indices: list[int]) -> list[Any]:
            with lockstep(model):
                return work(indices) if indices else []

        return lockstep_work


def partition_by_cost(
    costs: Sequence[float], num_ranks: int, keys: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Split indices into shards of about equal cost; equal keys stay in one shard.

    >>> partition_by_cost([5, 1, 1, 4, 1], 2)
    [[0, 2], [1, 3, 4]]
    >>> partition_by_cost([1, 1, 1], 2, ["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys if keys is not None else range(len(costs))):
        groups.setdefault(key, []).append(index)
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for group in sorted(groups.values(), key=lambda g: (-sum(costs[i] for i in g), g[0])):
        least_loaded = loads.index(min(loads))
        shards[least_loaded] += group
        loads[least_loaded] += sum(costs[i] for i in group)
    return [sorted(shard) for shard in shards]


def replica_of_ranks(model: Any) -> list[int]:
    """Return which replica of the model each rank runs: tensor-parallel ranks share one."""
    own = replica_ranks(model)
    if len(own) == 1:
        return list(range(world_size()))
    first_ranks = gather_objects(own[0])
    numbers = {first: number for number, first in enumerate(sorted({*first_ranks}))}
    return [numbers[first] for first in first_ranks]


def run_on_all_ranks(work: Work, shards: list[list[int]]) -> list[Any]:
    """Run each rank's shard of the indices; return all results in the order of the indices.

    Ranks of one replica have the same shard, and the same results.
    """

    def run_shard() -> list[Any]:
        shard = shards[rank()]
        results = work(shard)
        assert len(results) == len(shard)
        return results

    by_index = {
        index: result
        for shard, results in zip(shards, all_ranks_or_none(run_shard), strict=True)
        for index, result in zip(shard, results, strict=True)
    }
    return [by_index[i] for i in range(len(by_index))]
