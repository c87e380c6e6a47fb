"""Figures of what the engine did: occupancy, cache, latencies, and a drawing of them over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .request import Request

if TYPE_CHECKING:
    from .batch import Step
    from .scheduler import Scheduler


class Stats:
    """Counts since the engine was made or `reset()` was called."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.steps = 0
        self.tokens_run = 0
        """Tokens that went through the model."""
        self.rows_padded = 0
        """Rows of graphs that carried no request."""
        self.graph_steps = 0
        self.graphs_captured = 0
        self.new_tokens = 0
        self.finished: dict[str, int] = {}
        self.preemptions = 0
        self.prefix_tokens = 0
        self.prompt_tokens = 0
        self.steps_log: list[tuple[float, int, int, int, int]] = []
        """Of each step: time, requests in it, waiting, tokens, pages in use."""
        self._queued_at: dict[int, float] = {}
        self._since = np.empty(0)
        """By slot: when its request was queued."""
        self._last = np.empty(0)
        """By slot: when its request's newest token came."""
        self._queue: list[float] = []
        self._first: list[np.ndarray] = []
        self._between: list[np.ndarray] = []
        self._slots = 1
        self._pages = 1

    def note_queued(self, request: Request, now: float) -> None:
        self._queued_at[request.id] = now

    def note_admitted(self, request: Request, now: float) -> None:
        if request.slot >= len(self._last):
            grow = request.slot + 1 - len(self._last)
            self._last = np.append(self._last, np.full(grow, np.nan))
            self._since = np.append(self._since, np.full(grow, np.nan))
        queued = self._queued_at.get(request.id, now)
        self._since[request.slot] = queued
        self._last[request.slot] = now if request.output else np.nan
        if not request.preempted:
            self._queue.append(now - queued)

    def note_step(self, now: float, step: Step, scheduler: Scheduler) -> None:
        self.steps += 1
        self.tokens_run += len(step.ids)
        pages = scheduler.pages
        used = pages.num_pages - pages.available
        self.steps_log.append((now, len(step.requests), scheduler.waiting, len(step.ids), used))
        self._slots, self._pages = scheduler.max_running, pages.num_pages
        self.preemptions = scheduler.preemptions
        self.prefix_tokens, self.prompt_tokens = scheduler.prefix_hits, scheduler.prompt_tokens

    def note_graph(self, padded: int, captured: int) -> None:
        self.graph_steps += 1
        self.rows_padded += padded
        self.graphs_captured = captured

    def note_tokens(self, slots: np.ndarray, now: float) -> None:
        """A step's tokens reached the host; whole columns, no Python per request."""
        self.new_tokens += len(slots)
        if len(self._last) == 0:
            return
        last = self._last[slots]
        fresh = np.isnan(last)
        if fresh.any():
            self._first.append(now - self._since[slots[fresh]])
        self._between.append(now - last[~fresh])
        self._last[slots] = now

    def note_finish(self, request: Request, now: float) -> None:
        reason = request.finish_reason or "error"
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._queued_at.pop(request.id, None)

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that ran a request, over steps."""
        return float(np.mean([s[1] for s in self.steps_log]) / self._slots) if self.steps else 0.0

    @property
    def page_use(self) -> float:
        """Largest share of the pages in use."""
        return max((s[4] for s in self.steps_log), default=0) / self._pages

    @property
    def padding(self) -> float:
        """Share of the tokens run that carried no request."""
        return self.rows_padded / max(self.rows_padded + self.tokens_run, 1)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the admitted tokens that were found in the cache."""
        return self.prefix_tokens / max(self.prompt_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time between the first and the last step."""
        span = self.steps_log[-1][0] - self.steps_log[0][0] if self.steps > 1 else 0.0
        return self.new_tokens / span if span else 0.0

    def summary(self) -> dict[str, float]:
        """All figures as one flat dictionary, ready for a trainer's logger; seconds."""
        figures = {
            "steps": self.steps,
            "graph_steps": self.graph_steps,
            "graphs_captured": self.graphs_captured,
            "new_tokens": self.new_tokens,
            "tokens_run": self.tokens_run,
            "tokens_per_second": self.tokens_per_second,
            "occupancy": self.occupancy,
            "page_use": self.page_use,
            "padding": self.padding,
            "prefix_hit_rate": self.prefix_hit_rate,
            "preemptions": self.preemptions,
        }
        figures |= {f"finished_{reason}": n for reason, n in self.finished.items()}
        for name, parts in (
            ("queue", [np.array(self._queue)]),
            ("first_token", self._first),
            ("between_tokens", self._between),
        ):
            values = np.concatenate([np.empty(0), *parts])
            for q in (50, 95, 99):
                figures[f"{name}_p{q}"] = float(np.percentile(values, q)) if len(values) else 0.0
        return figures

    def plot(self, path: str | Path) -> None:
        """Draw running and waiting requests and pages in use over time, as an SVG file."""
        width, height = 800, 240
        times = np.array([s[0] for s in self.steps_log] or [0.0])
        x = (times - times[0]) / max(float(np.ptp(times)), 1e-9) * width
        lines = []
        for column, colour, name in (
            (1, "#1565c0", "running"),
            (2, "#999", "waiting"),
            (4, "#c62828", "pages"),
        ):
            y = np.array([s[column] for s in self.steps_log] or [0.0], dtype=float)
            top = max(float(y.max()), 1.0)
            points = " ".join(
                f"{a:.1f},{height - b / top * height:.1f}" for a, b in zip(x, y, strict=True)
            )
            lines.append(
                f'<polyline fill="none" stroke="{colour}" points="{points}">'
                f"<title>{name}, at most {top:.0f}</title></polyline>"
            )
        seconds = float(np.ptp(times))
        Path(path).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -30 {width + 20} {height + 50}">'
            f'<text y="-10" font-family="sans-serif" font-size="14">running: blue, waiting: grey, '
            f"pages: red, each against its own maximum, over {seconds:.2f} s</text>"
            + "".join(lines)
            + "</svg>\n"
        )
