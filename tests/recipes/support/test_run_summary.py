"""What a run tells at its start and end, and its plot."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from nopad.packing import PackedDataset
from nopad.recipes.support import run_plot, run_summary

LOG = [
    {"step": step, "loss": 8.0 - step, "tokens": 900, "samples": 9, "packs": 1}
    for step in range(1, 5)
]
EVALUATIONS = [
    {"step": 0, "eval/parses": 0.0, "eval/seconds": 1.0},
    {"step": 4, "eval/parses": 0.25, "eval/seconds": 2.5},
]


def test_the_end_is_told_in_five_lines():
    lines = run_summary.summary_lines(LOG, EVALUATIONS, "parses", padded=0.3, budget=1000)
    assert lines == [
        "tokens trained  3,600 of 36 samples in 4 steps",
        "fill            90.0%, 9.0 samples per pack",
        "steps saved     8 of 12 that padding would take (67%)",
        "loss            7.00 -> 4.00 (the last step)",
        "evaluations     3.5 s in 2; parses 0% -> 25%",
    ]
    assert run_summary.summary_lines(LOG, [], None, 0.3, 1000)[-1] == "evaluations     0.0 s in 0"
    *_, loss, once = run_summary.summary_lines(LOG * 10, EVALUATIONS[:1], "parses", 0.3, 1000)
    assert loss == "loss            7.00 -> 5.50 (mean of the last 4 steps)"
    assert once == "evaluations     1.0 s in 1; parses 0%"
    assert "of the last 50 steps" in run_summary.summary_lines(LOG * 200, [], None, 0.3, 1000)[3]


@pytest.mark.parametrize("known", [True, False])
def test_padding_is_compared_before_the_first_step_also_for_a_stream(known):
    rows = [[1] * length for length in np.random.default_rng(0).integers(2, 60, 300).tolist()]
    data = PackedDataset(rows, budget=128, epochs=None)
    first = next(iter(data)).tokens.tolist()
    stream = type("Stream", (), {"lengths": None, "__iter__": lambda self: iter(data)})()
    padded = run_summary.expected_padded_fill(data if known else stream, 128)
    assert 0.4 < padded < 0.8 and f"{1 - padded:.1%}" in run_summary.padding_line(padded, 128)
    assert next(iter(data)).tokens.tolist() == first, "a pack of the run was consumed"


@pytest.mark.parametrize("log", [LOG, LOG[:1], [{"step": 1, "loss": float("nan")}]])
def test_the_plot_is_an_svg_with_a_panel_for_each_quantity(log):
    text = run_summary.plot("a <run>", log, EVALUATIONS, "parses", 0.3, 1000)
    root = ElementTree.fromstring(text)
    words = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <run>", "loss", "fill of the packs", "evaluation: parses"} <= words
    assert "nan" not in text and "evaluation" not in run_summary.plot("a", log, [], None, 0.3, 9)


def test_a_long_line_is_thinned_and_ticks_are_round():
    points = [(step, 1 / (step + 1)) for step in range(100_000)]
    assert len(run_plot.draw("long", [run_plot.Panel("loss", points)])) < 50_000
    assert run_plot._ticks(0, 0) == [0] and run_plot._ticks(0, 0.04) == [0, 0.01, 0.02, 0.03, 0.04]
