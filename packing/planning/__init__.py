"""Lengths in, plans out: which samples share a pack. Pure integers."""

from .cost import Cost
from .lengths import pack_lengths
from .leveling import level
from .overflow import Counts, Overflow
from .packer import Packer
from .plan import Plan
from .planner import Planner, whole

__all__ = [
    "Cost",
    "Counts",
    "Overflow",
    "Packer",
    "Plan",
    "Planner",
    "level",
    "pack_lengths",
    "whole",
]
