"""Plot of the engine's load over time: requests above, pages of the KV cache below.

    max_num_seqs ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
    running      ▄▄████████████████▅▃▁     waiting: a line with its own axis on the right

    pages        ▁▃▄▅▅▆▆▆▆▅▅▆▆▅▄▄▃▂▁▁▁
                 0        1        2  seconds

The state of a step holds until the next one starts, so all lines are step functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _LIGHT_BLUE, _BROWN, _INK = "#3f77ad", "#abcbe6", "#a63603", "#333333"
"""Different in lightness, so that they also differ in grayscale."""
_EMPTY_LOG = np.array([[0.0, 0, 0, 0, 0, 1, 1]])
_SHORTEST_STEP = 1e-3


def write_occupancy_plot(path: str | Path, log: np.ndarray, idle: np.ndarray, title: str) -> None:
    """Write the plot of a `Stats.steps_log` to a file, as SVG unless its suffix says otherwise.

    idle: times at which the engine ran out of work, until the next step.
    """
    figure = occupancy_figure(log, idle, title)
    from matplotlib import rc_context

    suffix = Path(path).suffix.lower().removeprefix(".")
    format = suffix if suffix in figure.canvas.get_supported_filetypes() else "svg"
    with rc_context({"svg.fonttype": "none"}):  # text instead of outlines: searchable and short
        figure.savefig(path, format=format, metadata={"Title": title})


def occupancy_figure(log: np.ndarray, idle: np.ndarray, title: str) -> Figure:
    """Draw the plot of a `Stats.steps_log`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError("matplotlib is not installed: pip install matplotlib") from None
    log = _with_idle_rows(log, idle) if len(log) else _EMPTY_LOG
    times = log[:, 0] - log[0, 0]
    running, waiting, used_pages, max_running, num_pages = log[:, [1, 2, 4, 5, 6]].T
    figure = Figure(figsize=(8.2, 4.5), layout="constrained")
    requests, pages = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
    queue = requests.twinx()
    figure.suptitle(title, fontweight="bold")
    times = np.append(times, times[-1] + _usual_step(times))
    _step_area(requests, times, running, "running")
    label = f"max_num_seqs ({max_running.max():,.0f})"
    _step_line(requests, times, max_running, label, color=_INK, linestyle="--")
    _step_line(queue, times, waiting, "waiting", color=_BROWN)
    _step_area(pages, times, 100 * used_pages / num_pages, f"used, % of {num_pages[-1]:,.0f}")
    requests.set(ylabel="requests", ylim=(0, 1.12 * max(max_running.max(), 1)))
    queue.set_ylabel("waiting", color=_BROWN)
    queue.set_ylim(0, 1.3 * max(waiting.max(), 1))
    pages.set(xlabel="seconds", ylabel="pages", ylim=(0, 100), xlim=(0, times[-1]))
    for axes in (requests, queue):
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    lines = [*requests.lines, *queue.lines]
    requests.legend(handles=lines, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    pages.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    for axes in (requests, pages):
        axes.grid(alpha=0.3)
    return figure


def thin_steps(x: np.ndarray, y: np.ndarray, bins: int = 330) -> np.ndarray:
    """Indices of the points to draw: at most three per bin of x (min, max, last), no repeats of y.

    >>> thin_steps(np.arange(6), np.array([1, 5, 2, 0, 3, 3]), bins=1).tolist()
    [1, 3, 5]
    """
    kept = np.arange(len(x))
    if len(x) > 3 * bins:
        edges = np.searchsorted(x, np.linspace(x[0], x[-1], bins + 1)[1:-1])
        chosen: set[int] = set()
        for indices in np.split(kept, edges):
            if len(indices):
                values = y[indices]
                chosen |= {int(indices[i]) for i in (values.argmin(), values.argmax(), -1)}
        kept = np.array(sorted(chosen))
    is_new = np.append(True, np.diff(y[kept]) != 0)
    return kept[is_new]


def _with_idle_rows(log: np.ndarray, idle: np.ndarray) -> np.ndarray:
    """The steps, with rows of zeros where the engine ran out of work."""
    after = np.searchsorted(log[:, 0], idle, side="right")
    idle, after = idle[after > 0], after[after > 0]
    rows = log[after - 1] * [0, 0, 0, 0, 0, 1, 1]
    rows[:, 0] = idle
    return np.insert(log, after, rows, axis=0)


def _usual_step(times: np.ndarray) -> float:
    """Median duration of a step: used for the last step, whose end is not recorded."""
    return float(np.median(np.diff(times))) or _SHORTEST_STEP if len(times) > 1 else _SHORTEST_STEP


def _step_line(axes: Axes, times: np.ndarray, values: np.ndarray, label: str, **style) -> None:
    """Draw a step function; `times` has one more entry, where the last step ends."""
    kept = thin_steps(times[:-1], values)
    x, y = np.append(times[kept], times[-1]), np.append(values[kept], values[-1])
    x[0] = times[0]
    axes.plot(x, y, drawstyle="steps-post", linewidth=1.2, label=label, **style)


def _step_area(axes: Axes, times: np.ndarray, values: np.ndarray, label: str) -> None:
    _step_line(axes, times, values, label, color=_BLUE)
    (line,) = axes.lines[-1:]
    x, y = line.get_data()
    axes.fill_between(x, y, step="post", color=_LIGHT_BLUE, linewidth=0)
