"""Ranks of a tensor-parallel replica, and the smallest value among them, so that all plan alike.

Every forward is a collective of such ranks. They must therefore plan the same steps: from the same
requests, over the same number of pages, dropping cached prefixes at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...runtime import rank, replica_mesh, world_size


def replica_ranks(model: Any) -> list[int]:
    """Return the ranks that run this rank's replica of a model, itself included."""
    mesh = None if world_size() == 1 else replica_mesh(model)
    return [rank()] if mesh is None else mesh.mesh.flatten().tolist()


def smallest_of_replica(model: Any, value: int) -> int:
    """Return the smallest of the values that the ranks of a replica pass."""
    mesh = None if world_size() == 1 else replica_mesh(model)
    if mesh is None:
        return value
    shared = torch.tensor(value, device=next(model.parameters()).device)
    dist.all_reduce(shared, dist.ReduceOp.MIN, group=mesh.get_group())
    return int(shared)
