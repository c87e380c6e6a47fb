"""Documents to packs: samples laid end to end in fixed token budgets.

Everything but `PackedDataset` is free of torch, which is loaded only when that name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .jit import jit
from .pack import Pack
from .planning.lengths import pack_lengths
from .planning.packer import Packer
from .planning.plan import Plan
from .planning.planner import Planner
from .sample import IGNORE_INDEX, Sample
from .token_ids import check_masks, checked_ids, checked_sample

if TYPE_CHECKING:
    from .dataset import PackedDataset

__all__ = [
    "IGNORE_INDEX",
    "Pack",
    "PackedDataset",
    "Packer",
    "Plan",
    "Planner",
    "Sample",
    "check_masks",
    "checked_ids",
    "checked_sample",
    "jit",
    "pack_lengths",
]


def __getattr__(name: str) -> Any:
    if name == "PackedDataset":
        from .dataset import PackedDataset

        return PackedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
