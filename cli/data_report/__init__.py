"""The report on packing a dataset: figures, a map of packs, their text, and an HTML page."""

from .composition import Composition, extreme_lines, role_line
from .figures import Bin, BudgetRow, budget_rows, length_bins
from .html_page import DataReport, write_html
from .labelled_text import Span, labelled_samples
from .pack_map import draw_packs

__all__ = [
    "Bin",
    "BudgetRow",
    "Composition",
    "DataReport",
    "Span",
    "budget_rows",
    "draw_packs",
    "extreme_lines",
    "labelled_samples",
    "length_bins",
    "role_line",
    "write_html",
]
