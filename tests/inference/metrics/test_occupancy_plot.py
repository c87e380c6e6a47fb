"""The drawing of occupancy is true to the log, and short however long that is."""

from __future__ import annotations

import re
import time
from xml.etree import ElementTree

import numpy as np
import pytest
from nopad.inference import Engine
from nopad.inference.metrics.occupancy_plot import LEFT, RIGHT, Panel, occupancy_svg, ticks

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
NEVER = np.empty(0)
REQUESTS = (68, 248)


def log_of(*steps: tuple[float, int, int, int]) -> np.ndarray:
    """(time, running, waiting, pages in use) of steps with 4 slots and 10 pages."""
    return np.array([(t, run, wait, run, used, 4, 10) for t, run, wait, used in steps], float)


def stairs(svg: str) -> list[list[tuple[float, float]]]:
    """(x, y) where each step begins: of running, pages, slots, waiting."""
    found = []
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        if path.get("stroke-width"):
            line = re.sub("V[0-9.]+H[0-9.]+Z$", "", path.get("d", ""))  # the bottom of an area
            steps = re.findall(r"(?:^M|H)([0-9.]+)[ V]([0-9.]+)", line)
            found.append([(float(x), float(y)) for x, y in steps])
    return found


def values(steps: list[tuple[float, float]], most: float) -> list[float]:
    top, bottom = REQUESTS
    return [round((bottom - y) / (bottom - top) * most, 1) for _, y in steps]


def test_steps_are_drawn_as_long_and_as_high_as_they_were():
    log = log_of((7.0, 2, 3, 5), (7.25, 4, 1, 10), (7.75, 1, 0, 0))
    svg = occupancy_svg(log, np.array([8.0]), "a < b")
    running, pages, slots, waiting = stairs(svg)
    assert values(running, 1.12 * 4) == [2, 4, 1, 0]
    assert values(slots, 1.12 * 4) == [4, 4, 4, 4]
    assert values(waiting, 1.3 * 3) == [3, 1, 0, 0]
    assert [y for _, y in pages] == [Panel(292, 402, 100).y(v) for v in (50, 100, 0, 0)]
    seconds = [(x - LEFT) / (RIGHT - LEFT) * 1.25 for x, _ in running]  # one usual step of nothing
    assert seconds == pytest.approx([0, 0.25, 0.75, 1.0], abs=1e-3)
    assert "a &lt; b" in svg


def test_nothing_runs_in_a_pause_between_two_calls():
    log = log_of((1.0, 2, 0, 1), (9.0, 3, 0, 1))
    running, *_ = stairs(occupancy_svg(log, np.array([0.5, 2.0]), ""))
    assert values(running, 1.12 * 4) == [2, 0, 3]


@pytest.mark.parametrize("steps", [(), ((5.0, 2, 3, 4),), ((5.0, 2, 3, 4), (5.0, 1, 0, 0))])
def test_a_log_without_duration_is_drawn(steps):
    svg = occupancy_svg(log_of(*steps).reshape(-1, 7), NEVER, "")
    assert len(stairs(svg)) == 4 and "nan" not in svg and "inf" not in svg


def test_a_long_log_makes_a_short_file_that_keeps_what_stands_out():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.01, 50_000))
    log = log_of(*((t, 2, 5, 5) for t in times))
    log[31_007, [1, 2]] = 4, 900
    log[12_345, 1] = 0
    svg = occupancy_svg(log, NEVER, "")
    running, _, _, waiting = stairs(svg)
    assert len(svg) < 70_000 and max(map(len, stairs(svg))) <= 1000
    assert set(values(running, 1.12 * 4)) == {0, 2, 4}
    assert max(values(waiting, 1.3 * 900)) == pytest.approx(900, abs=1)


@pytest.mark.parametrize("most", [1.12, 17.9, 2e-4, 1, 3600, 12_345_678])
def test_ticks_are_few_and_within_the_axis(most):
    made = ticks(most, 6)
    assert 2 <= len(made) <= 7 and made[0] == 0 and made[-1] <= most


def test_a_dial_turned_below_what_runs_leaves_running_within_the_slots(tiny, tmp_path):
    engine = Engine(tiny("llama"), max_num_seqs=4)
    for i in range(8):
        engine.add_request([5, 6, i], GREEDY)
    engine.step()
    engine.max_num_seqs = 2  # while four run
    while engine._loop.busy:
        engine.step()
    engine.stats.plot(tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    running, _, slots, _ = (values(line, 1.12 * 4) for line in stairs(text))
    assert all(run <= most for run, most in zip(running, slots, strict=True))
    assert max(running) == 4 and slots[-1] == 2 and running[-1] == 0
    assert re.search(r"<title>\d+ % of the slots occupied on average, [\d,]+ new tokens/s<", text)


def test_a_step_lasts_from_its_beginning_until_nothing_is_left(tiny):
    model = tiny("llama")
    engine = Engine(model)
    engine.generate([[5, 6]], GREEDY)
    engine.stats.reset()
    hook = model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    engine.generate([[5, 6, 7]], GREEDY | {"max_tokens": 1})
    hook.remove()
    (began, *_), (ended,) = engine.stats.steps_log[0], engine.stats._idle.rows()
    assert ended - began >= 0.05


def test_requests_that_are_cancelled_or_lost_leave_nothing_running(tiny):
    engine = Engine(tiny("llama"))
    engine.add_request([5, 6], GREEDY)
    number = engine.add_request([5, 7], GREEDY)
    engine.step()
    engine.abort(number)
    assert len(engine.stats._idle.rows()) == 0
    engine.release()
    assert len(engine.stats._idle.rows()) == 1
