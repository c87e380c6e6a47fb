"""The occupancy plot is true to the log, and small however long the log is."""

from __future__ import annotations

import re
import sys
import time

import numpy as np
import pytest
from nopad.inference import Engine
from nopad.inference.metrics.occupancy_plot import occupancy_figure, write_occupancy_plot

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
NEVER = np.empty(0)


def log_of(*steps: tuple[float, int, int, int]) -> np.ndarray:
    """(time, running, waiting, used pages) of steps with max_num_seqs=4 and 10 pages."""
    return np.array([(t, run, wait, run, used, 4, 10) for t, run, wait, used in steps], float)


def drawn(figure) -> dict[str, tuple[list[float], list[float]]]:
    """(times, values) of each line of the figure; values hold until the next time."""
    lines = [line for axes in figure.axes for line in axes.lines]
    assert all(line.get_drawstyle() == "steps-post" for line in lines)
    names = {"running": "running", "max_num_seqs": "limit", "used": "pages", "waiting": "waiting"}
    return {
        names[line.get_label().split()[0].rstrip(",")]: (
            line.get_xdata().tolist(),
            line.get_ydata().tolist(),
        )
        for line in lines
    }


def value_at(line: tuple[list[float], list[float]], time: float) -> float:
    return line[1][np.searchsorted(line[0], time, side="right") - 1]


def test_steps_are_drawn_as_long_and_as_high_as_they_were():
    log = log_of((7.0, 2, 3, 5), (7.25, 4, 1, 10), (7.75, 1, 0, 0))
    figure = occupancy_figure(log, np.array([8.0]), "a < b")
    lines = drawn(figure)
    assert lines["running"] == ([0, 0.25, 0.75, 1.0, 1.25], [2, 4, 1, 0, 0])
    assert lines["waiting"] == ([0, 0.25, 0.75, 1.25], [3, 1, 0, 0])
    assert lines["pages"] == ([0, 0.25, 0.75, 1.25], [50, 100, 0, 0])
    assert lines["limit"] == ([0, 1.25], [4, 4])  # one usual step of nothing at the end
    assert figure.get_suptitle() == "a < b"


def test_nothing_runs_in_a_pause_between_two_calls():
    log = log_of((1.0, 2, 0, 1), (9.0, 3, 0, 1))
    lines = drawn(occupancy_figure(log, np.array([0.5, 2.0]), ""))
    assert lines["running"][1] == [2, 0, 3, 3] and lines["running"][0][:3] == [0, 1, 8]


@pytest.mark.parametrize("steps", [(), ((5.0, 2, 3, 4),), ((5.0, 2, 3, 4), (5.0, 1, 0, 0))])
def test_a_log_without_duration_is_drawn(steps, tmp_path):
    log = log_of(*steps).reshape(-1, 7)
    lines = drawn(occupancy_figure(log, NEVER, ""))
    assert len(lines) == 4
    assert all(np.isfinite(line).all() and line[0][-1] > 0 for line in lines.values())
    write_occupancy_plot(tmp_path / "plot", log, NEVER, "")  # SVG if the suffix says nothing
    svg = (tmp_path / "plot").read_text()
    assert "<svg" in svg and not re.search(r'[ "](nan|inf)', svg)


def test_a_long_log_makes_a_short_file_that_keeps_what_stands_out(tmp_path):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.01, 50_000))
    log = log_of(*((t, 2, 5, 5) for t in times))
    log[31_007, [1, 2]] = 4, 900
    log[12_345, 1] = 0
    lines = drawn(occupancy_figure(log, NEVER, ""))
    assert set(lines["running"][1]) == {0, 2, 4} and max(lines["waiting"][1]) == 900
    write_occupancy_plot(tmp_path / "plot.svg", log, NEVER, "")
    assert len((tmp_path / "plot.svg").read_text()) < 70_000
    log[:, 1] = rng.integers(0, 5, 50_000)
    assert max(len(x) for x, _ in drawn(occupancy_figure(log, NEVER, "")).values()) <= 1000
    write_occupancy_plot(tmp_path / "plot.svg", log, NEVER, "")
    assert len((tmp_path / "plot.svg").read_text()) < 150_000


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        write_occupancy_plot(tmp_path / "plot.svg", log_of(), NEVER, "")


@pytest.mark.parametrize("limit", [1, 4, 17, 3600])
def test_ticks_are_few_whole_numbers_within_the_axis(limit):
    log = log_of((0.0, 1, 0, 1), (1.0, 1, 0, 1))
    log[:, 5] = limit
    axes = occupancy_figure(log, NEVER, "").axes[0]
    ticks = [tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]]
    assert 2 <= len(ticks) <= 7 and ticks[0] == 0 and all(tick == int(tick) for tick in ticks)


def test_a_limit_lowered_below_what_runs_is_drawn_above_it(tiny, tmp_path):
    engine = Engine(tiny("llama"), max_num_seqs=4)
    for i in range(8):
        engine.add_request([5, 6, i], GREEDY)
    engine.step()
    engine.max_num_seqs = 2  # while four run
    while engine._loop.busy:
        engine.step()
    lines = drawn(occupancy_figure(engine.stats.steps_log, engine.stats._idle_since.rows(), ""))
    running, limit = lines["running"], lines["limit"]
    assert all(value <= value_at(limit, t) for t, value in zip(*running, strict=True))
    assert max(running[1]) == 4 and limit[1][-1] == 2 and running[1][-1] == 0
    engine.stats.plot(tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert re.search(r">\d+ % of max_num_seqs on average, [\d,]+ new tokens/s<", text)


def test_a_step_lasts_from_its_beginning_until_nothing_is_left(tiny):
    model = tiny("llama")
    engine = Engine(model)
    engine.generate([[5, 6]], GREEDY)
    engine.stats.reset()
    hook = model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    engine.generate([[5, 6, 7]], GREEDY | {"max_tokens": 1})
    hook.remove()
    (began, *_), (ended,) = engine.stats.steps_log[0], engine.stats._idle_since.rows()
    assert ended - began >= 0.05


def test_requests_that_are_cancelled_or_lost_leave_nothing_running(tiny):
    engine = Engine(tiny("llama"))
    engine.add_request([5, 6], GREEDY)
    number = engine.add_request([5, 7], GREEDY)
    engine.step()
    engine.abort(number)
    assert len(engine.stats._idle_since.rows()) == 0
    engine.release()
    assert len(engine.stats._idle_since.rows()) == 1
