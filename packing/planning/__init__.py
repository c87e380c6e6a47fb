"""Decide from lengths which samples share a pack: `Planner`, and `Packer` for samples."""

from ..argument_checks import check_ints
from .balancing import Cost, balance_plan
from .overflow import Overflow
from .pack_lengths import pack_lengths
from .packer import Packer
from .padded_fill import padded_fill
from .planner import Counts, Plan, Planner, Strategy

__all__ = [
    "Cost",
    "Counts",
    "Overflow",
    "Packer",
    "Plan",
    "Planner",
    "Strategy",
    "balance_plan",
    "check_ints",
    "pack_lengths",
    "padded_fill",
]
