"""Lengths to plans in pure integers: which samples share a pack."""

from .balancing import Cost, balance_plan
from .overflow import Counts, Overflow
from .packer import Packer
from .padding import padded_fill
from .plan import Plan
from .planner import Planner, Strategy, check_ints, pack_lengths

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
