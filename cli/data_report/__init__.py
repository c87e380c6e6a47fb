"""The report on packing a dataset: figures, a map of packs, their text, an HTML page, JSON."""

from .composition import (
    EXTREMES,
    MAX_LOCATIONS,
    Composition,
    role_figures,
    role_line,
    sample_figures,
    sample_lines,
)
from .figures import Bin, BudgetRow, budget_rows, length_bins
from .html_page import DataReport, write_html
from .json_file import write_json
from .labelled_text import Span, labelled_samples
from .pack_map import draw_packs
from .row_samples import RowSamples

__all__ = [
    "EXTREMES",
    "MAX_LOCATIONS",
    "Bin",
    "BudgetRow",
    "Composition",
    "DataReport",
    "RowSamples",
    "Span",
    "budget_rows",
    "draw_packs",
    "labelled_samples",
    "length_bins",
    "role_figures",
    "role_line",
    "sample_figures",
    "sample_lines",
    "write_html",
    "write_json",
]
