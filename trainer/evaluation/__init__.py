"""Evaluation by generation during training: examples, metrics, reports."""

from .generation_eval import Example, GenerationEval
from .metrics import contains, exact_match, extracted
from .report import Report
from .tables import lines

__all__ = [
    "Example",
    "GenerationEval",
    "Report",
    "contains",
    "exact_match",
    "extracted",
    "lines",
]
