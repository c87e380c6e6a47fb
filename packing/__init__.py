"""Documents to packs: samples laid end to end in fixed token budgets."""

from .lengths import pack_lengths
from .pack import Pack
from .plan import Plan
from .planner import Planner
from .sample import IGNORE, Sample

__all__ = ["IGNORE", "Pack", "Plan", "Planner", "Sample", "pack_lengths"]
