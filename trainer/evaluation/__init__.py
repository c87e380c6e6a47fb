"""Evaluation by generation during training: examples, metrics, a time budget, reports."""

from .eval_report import Example, Report
from .example_rows import read_examples, row_example
from .generation_eval import GenerationEval
from .metrics import contains, exact_match, regex_match
from .report_writer import report_lines

__all__ = [
    "Example",
    "GenerationEval",
    "Report",
    "contains",
    "exact_match",
    "read_examples",
    "regex_match",
    "report_lines",
    "row_example",
]
