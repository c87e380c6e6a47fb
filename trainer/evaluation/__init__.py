"""Evaluation by generation during training: examples, metrics, a time budget, reports."""

from .generation_eval import GenerationEval
from .metrics import contains, exact_match, extracted
from .report import Example, Report
from .tables import report_lines

__all__ = [
    "Example",
    "GenerationEval",
    "Report",
    "contains",
    "exact_match",
    "extracted",
    "report_lines",
]
