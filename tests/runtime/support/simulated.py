"""A process group of several ranks in one process: meshes and sharded models without launching."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist


@contextmanager
def ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Be one of `world` ranks; the others do not exist, and collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_meshes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        patch.setenv("RANK", str(rank))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _forget_meshes() -> None:
    """Drop the meshes that torch remembers: they are found as long as they live."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for thing in gc.get_objects():
        is_cache = type(thing) is functools._lru_cache_wrapper
        if is_cache and str(thing.__module__).startswith("torch.distributed"):
            thing.cache_clear()
    gc.collect()
