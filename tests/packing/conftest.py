"""What the tests of packing share: documents, digests, and a run of many ranks and workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from nopad.packing import Pack, PackedDataset
from nopad.packing.ordering import Share
from nopad.packing.state import merge_states


def digest(pack: Pack) -> tuple[int, str]:
    """A pack's place and a hash of all it holds; an empty one has no hash."""
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


class Run:
    """World x workers readers of one dataset, collected as DataLoaders and a trainer would."""

    def __init__(self, make: Callable[..., PackedDataset], world: int, workers: int = 1):
        self.make, self.world, self.workers = make, world, workers
        self.mains = [make(rank=rank, world=world) for rank in range(world)]
        self.state: dict | None = None

    def load(self, state: dict) -> Run:
        """Continue from a state, which has to survive JSON."""
        self.state = json.loads(json.dumps(state))
        for main in self.mains:
            main.load_state_dict(self.state)
        return self

    def packs(self):
        """Give the packs of all ranks, round by round, counting each as stepped."""
        loaders = [self._loader(rank) for rank in range(self.world)]
        for _ in count():
            packs = [next(loader, None) for loader in loaders]
            if all(pack is None for pack in packs):
                return
            assert all(pack is not None for pack in packs), "ranks ended at different steps"
            for main, pack in zip(self.mains, packs, strict=True):
                main.stepped(pack)
            yield from sorted(packs, key=lambda pack: pack.index)

    def _loader(self, rank: int):
        """One pack of each worker in turn; a worker that has ended is left out."""
        workers = [iter(self._worker(rank, worker)) for worker in range(self.workers)]
        while workers:
            for worker in list(workers):
                pack = next(worker, None)
                if pack is None:
                    workers.remove(worker)
                else:
                    yield pack

    def _worker(self, rank: int, worker: int) -> PackedDataset:
        dataset = self.make(rank=rank, world=self.world)
        if self.state is not None:
            dataset.load_state_dict(self.state)
        share = Share(rank, self.world, worker, self.workers)
        dataset._share = lambda: share
        return dataset

    def saved(self) -> dict:
        """Give the state of the run, joined over ranks."""
        return merge_states([main.state_dict() for main in self.mains])


@pytest.fixture(scope="session")
def tools():
    """Give the helpers to tests, which cannot import each other."""

    class Tools:
        pass

    Tools.digest, Tools.documents, Tools.Run = staticmethod(digest), staticmethod(documents), Run
    return Tools


@pytest.fixture
def jsonl(tmp_path):
    """Write rows of token ids as JSON lines."""

    def write(rows, name: str = "rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"input_ids": list(map(int, r))}) + "\n" for r in rows))
        return path

    return write
