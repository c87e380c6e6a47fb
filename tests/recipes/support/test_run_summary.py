"""What a run tells at its end, and its plot."""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from nopad.packing import PackedDataset
from nopad.recipes import pretrain
from nopad.recipes.support.run_dir import EVAL_LOG, RunDir
from nopad.recipes.support.run_summary import expected_padded_fill, write_summary


def run(folder, losses, evaluated: bool = True) -> RunDir:
    args = pretrain.parse_args(["--output", str(folder / "a <run>")])
    run = RunDir("pretrain", args)
    run.start(True)
    for step, loss in enumerate(losses, start=1):
        run.log(step, {"loss": loss, "tokens": 900, "samples": 9, "packs": 1})
    for step, score in ((0, 0.0), (len(losses), 0.25)) if evaluated else ():
        run.log(step, {"eval/parses": score, "eval/seconds": 1.75}, EVAL_LOG)
    return run


def test_the_end_is_told_in_five_lines(tmp_path):
    lines = write_summary(run(tmp_path, [7.0, 6.0, 5.0, 4.0]), padded=0.3, budget=1000)
    assert lines == [
        "tokens trained  3,600 of 36 samples in 4 steps",
        "fill            90.0%, 9.0 samples per pack",
        "steps saved     8 of 12 that padded batches would take",
        "loss            7.00 -> 4.00 (mean of the last tenth)",
        "evaluations     3.5 s in 2; parses 0% -> 25%",
        f"plot            {tmp_path}/a <run>/training.svg",
    ]


def test_a_run_without_evaluations_or_steps_is_told_too(tmp_path):
    lines = write_summary(run(tmp_path, [7.0] * 20 + [5.0] * 20, evaluated=False), 0.3, 1000)
    assert lines[3].startswith("loss            7.00 -> 5.00 ")
    assert lines[4] == "evaluations     0.0 s in 0"
    (tmp_path / "none").mkdir()
    assert write_summary(run(tmp_path / "none", []), 0.3, 1000) == []


@pytest.mark.parametrize("losses", [[7.0, 6.0, 5.0], [7.0], [float("nan")], [3.0] * 5000])
def test_the_plot_is_an_svg_with_a_panel_for_each_quantity(losses, tmp_path):
    write_summary(run(tmp_path, losses), 0.3, 1000)
    text = (tmp_path / "a <run>" / "training.svg").read_text()
    root = ElementTree.fromstring(text)
    words = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <run>", "fill; dashed: of padded batches", "evaluation: parses"} <= words
    assert "nan" not in text and len(text) < 20_000


@pytest.mark.parametrize("known", [True, False])
def test_padding_is_compared_without_a_pack_of_the_run_also_for_a_stream(known):
    rows = [[1] * length for length in np.random.default_rng(0).integers(2, 60, 300).tolist()]
    data = PackedDataset(rows, budget=128, epochs=None)
    first = next(iter(data)).tokens.tolist()
    stream = type("Stream", (), {"lengths": None, "__iter__": lambda self: iter(data)})()
    args = SimpleNamespace(budget=128, overflow="split", max_length=None)
    assert 0.4 < expected_padded_fill(data if known else stream, args) < 0.8
    assert next(iter(data)).tokens.tolist() == first
