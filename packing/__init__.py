"""Documents to packs: samples concatenated into fixed token budgets.

Only `PackedDataset` needs torch, which is imported when that name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .argument_checks import check_flags
from .document_starts import row_inner_starts
from .numba_jit import jit
from .pack import MAX_BUDGET, Pack
from .planning.pack_lengths import pack_lengths
from .planning.packer import Packer
from .planning.planner import Plan, Planner
from .sample import IGNORE_INDEX, Sample
from .targets import add_target, is_per_token
from .token_ids import MAX_TOKEN_ID, check_masks, make_sample, refuse_images, validate_token_ids

if TYPE_CHECKING:
    from .dataset import PackedDataset
    from .encoding.tokenization import tokenize

__all__ = [
    "IGNORE_INDEX",
    "MAX_BUDGET",
    "MAX_TOKEN_ID",
    "Pack",
    "PackedDataset",
    "Packer",
    "Plan",
    "Planner",
    "Sample",
    "add_target",
    "check_flags",
    "check_masks",
    "is_per_token",
    "jit",
    "make_sample",
    "pack_lengths",
    "refuse_images",
    "row_inner_starts",
    "tokenize",
    "validate_token_ids",
]


def __getattr__(name: str) -> Any:
    if name == "PackedDataset":
        from .dataset import PackedDataset

        return PackedDataset
    if name == "tokenize":
        from .encoding.tokenization import tokenize

        return tokenize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
