"""Shared by the packing tests: documents, digests, and a run of many ranks and workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
from nopad.packing import Pack, PackedDataset
from nopad.packing.ordering import RankShare
from nopad.packing.state import merge_states


def digest(pack: Pack) -> tuple[int, str]:
    """A pack's index and a hash of its content; an empty pack has no hash."""
    if not len(pack.tokens):
        return pack.index, ""
    parts = (pack.tokens, pack.labels, pack.cu_seqlens, pack.samples, pack.sources)
    whole = hashlib.sha256(b"".join(part.tobytes() for part in parts))
    return pack.index, whole.hexdigest()[:16]


def documents(n: int, seed: int = 0, longest: int = 80) -> list[np.ndarray]:
    """Random token ids, a few documents of them very long."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 1.0, n), 1, longest).astype(int)
    return [rng.integers(0, 500, length) for length in lengths]


def full(packs: Iterable[Pack]) -> list[tuple[int, str]]:
    """The digests of all packs but the empty ones."""
    return [digest(pack) for pack in packs if len(pack.tokens)]


def resumed(loader: Callable[[], Any], cut: int) -> list[tuple[int, str]]:
    """The digests of a StatefulDataLoader's packs, the run stopped after `cut` of them."""
    first = loader()
    packs = iter(first)
    head = [digest(next(packs)) for _ in range(cut)]
    state = first.state_dict()
    del packs
    second = loader()
    second.load_state_dict(state)
    return head + [digest(pack) for pack in second]


class Run:
    """World size x workers readers of one dataset, collected as DataLoaders and a trainer would."""

    def __init__(self, make: Callable[..., PackedDataset], world_size: int, workers: int = 1):
        self.make, self.world_size, self.workers = make, world_size, workers
        self.mains = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
        self.state: dict | None = None

    def load(self, state: dict) -> Run:
        """Continue from a state, which has to survive JSON."""
        self.state = json.loads(json.dumps(state))
        for main in self.mains:
            main.load_state_dict(self.state)
        return self

    def packs(self):
        """Yield the packs of all ranks, round by round, marking each as trained."""
        loaders = [self._loader(rank) for rank in range(self.world_size)]
        for _ in count():
            packs = [next(loader, None) for loader in loaders]
            if all(pack is None for pack in packs):
                return
            assert all(pack is not None for pack in packs), "ranks ended at different steps"
            for main, pack in zip(self.mains, packs, strict=True):
                main.mark_trained(pack)
            yield from sorted(packs, key=lambda pack: pack.index)

    def _loader(self, rank: int):
        """One pack of each worker in turn; a worker that has ended is skipped."""
        workers = [iter(self._worker(rank, worker)) for worker in range(self.workers)]
        while workers:
            for worker in list(workers):
                pack = next(worker, None)
                if pack is None:
                    workers.remove(worker)
                else:
                    yield pack

    def _worker(self, rank: int, worker: int) -> PackedDataset:
        dataset = self.make(rank=rank, world_size=self.world_size)
        if self.state is not None:
            dataset.load_state_dict(self.state)
        share = RankShare(rank, self.world_size, worker, self.workers)
        dataset._share = lambda: share
        return dataset

    def saved(self) -> dict:
        """Return the state of the run, merged over ranks."""
        return merge_states([main.state_dict() for main in self.mains])


@pytest.fixture(scope="session")
def tools():
    """Return the helpers."""

    class Tools:
        pass

    Tools.digest, Tools.documents, Tools.Run = staticmethod(digest), staticmethod(documents), Run
    Tools.full, Tools.resumed = staticmethod(full), staticmethod(resumed)
    return Tools


@pytest.fixture
def jsonl(tmp_path):
    """Write rows of token ids as JSON lines."""

    def write(rows, name: str = "rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"input_ids": list(map(int, r))}) + "\n" for r in rows))
        return path

    return write


@pytest.fixture
def make(tools, jsonl):
    """Return a function that opens a dataset of each kind for one rank."""
    rows = tools.documents(400)
    path = jsonl(rows)
    other = jsonl(tools.documents(150, seed=1), "other.jsonl")

    def open_one(kind, rank=0, world_size=1, **options):
        options = {"budget": 128, "pool": 24, "rank": rank, "world_size": world_size, **options}
        if kind in ("planned", "leveled"):
            return PackedDataset(rows, balance=kind == "leveled", **options)
        options = {"shards": 8, "shuffle": 16, "pretokenize": False, **options}
        if kind == "mixed":
            return PackedDataset(
                [(path, 2), (other, 1)],
                stopping_strategy="all_exhausted_without_replacement",
                **options,
            )
        return PackedDataset(path, **options)

    return open_one
