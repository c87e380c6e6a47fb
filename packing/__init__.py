"""Documents to packs: samples laid end to end in fixed token budgets."""

from .pack import Pack
from .sample import IGNORE, Sample

__all__ = ["IGNORE", "Pack", "Sample"]
