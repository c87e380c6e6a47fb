"""Figures of what the engine did: occupancy, cache, latencies, and a drawing of them over time.

Counts go on until `reset()`; of steps and latencies the newest tens of thousands are kept, so an
engine that is asked again and again takes no more memory for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from ..requests.request import Request
from .occupancy_plot import occupancy_svg
from .ring_buffer import RingBuffer

if TYPE_CHECKING:
    from ..scheduling.scheduler import Scheduler
    from ..scheduling.step import Step


class Stats:
    """Counts since the engine was made or `reset()` was called."""

    def __init__(self) -> None:
        self._counted: WeakKeyDictionary[Scheduler, tuple[int, int, int]] = WeakKeyDictionary()
        """What a scheduler had counted at its last step: its counters outlive a reset."""
        self._queued_at: dict[int, float] = {}
        """By request, while it is under way: when it was queued; a reset changes nothing there."""
        self._since = np.empty(0)
        """By slot: when its request was queued."""
        self._last = np.empty(0)
        """By slot: when its request's newest token came."""
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.steps = 0
        self.num_computed_tokens = 0
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
        self.step_seconds = 0.0
        """Time spent in steps, from planning to reading; what passes between two does not count."""
        self.setup_seconds = 0.0
        """Time it took to set up: to lay out the cache, compile kernels and prove that they fit."""
        self.capture_seconds = 0.0
        """Time it took to capture graphs, inside the steps that needed them first."""
        self._log = RingBuffer(7)
        self._idle = RingBuffer()
        self._queue_time, self._ttft, self._itl = RingBuffer(), RingBuffer(), RingBuffer()

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
            self._queue_time.add(np.array([now - queued]))

    @property
    def steps_log(self) -> np.ndarray:
        """One row for each of the newest steps, oldest first.

        Time, requests in it, waiting, tokens, pages in use, requests and pages there might be.
        """
        return self._log.rows()

    def note_time(self, seconds: float) -> None:
        """A step was planned and launched, or the last ones were read."""
        self.step_seconds += seconds

    def note_step(self, now: float, step: Step, scheduler: Scheduler) -> None:
        self.steps += 1
        self.num_computed_tokens += len(step.ids)
        pages = scheduler.pages
        used = pages.num_pages - pages.available
        running = len(step.requests)
        most = max(scheduler.max_num_seqs, running)  # the dial may have been turned below it
        row = (now, running, scheduler.waiting, len(step.ids), used, most, pages.num_pages)
        self._log.add(np.array([row]))
        counted = (scheduler.preemptions, scheduler.prefix_hits, scheduler.prompt_tokens)
        before = self._counted.get(scheduler, (0, 0, 0))
        self.preemptions += counted[0] - before[0]
        self.prefix_tokens += counted[1] - before[1]
        self.prompt_tokens += counted[2] - before[2]
        self._counted[scheduler] = counted

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
            self._ttft.add(now - self._since[slots[fresh]])
        self._itl.add(now - last[~fresh])
        self._last[slots] = now

    def note_finish(self, request: Request, now: float) -> None:
        reason = request.finish_reason or "error"
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._queued_at.pop(request.id, None)
        if not self._queued_at:
            self._idle.add(np.array([now]))

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that ran a request, over steps."""
        log = self.steps_log
        return float((log[:, 1] / log[:, 5]).mean()) if self.steps else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Largest share of the pages in use."""
        log = self.steps_log
        return float((log[:, 4] / log[:, 6]).max(initial=0))

    @property
    def padding(self) -> float:
        """Share of the tokens run that carried no request."""
        return self.rows_padded / max(self.rows_padded + self.num_computed_tokens, 1)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the admitted tokens that were found in the cache."""
        return self.prefix_tokens / max(self.prompt_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time spent in steps."""
        return self.new_tokens / self.step_seconds if self.step_seconds else 0.0

    def summary(self) -> dict[str, float]:
        """All figures as one flat dictionary, ready for a trainer's logger; seconds."""
        figures = {
            "steps": self.steps,
            "graph_steps": self.graph_steps,
            "graphs_captured": self.graphs_captured,
            "new_tokens": self.new_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "tokens_per_second": self.tokens_per_second,
            "occupancy": self.occupancy,
            "kv_cache_usage": self.kv_cache_usage,
            "padding": self.padding,
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
            "setup_seconds": self.setup_seconds,
            "capture_seconds": self.capture_seconds,
            "preemptions": self.preemptions,
        }
        figures |= {f"finished_{reason}": n for reason, n in self.finished.items()}
        for name, window in (
            ("queue_time", self._queue_time),
            ("ttft", self._ttft),
            ("itl", self._itl),
        ):
            values = window.rows()
            for q in (50, 95, 99):
                figures[f"{name}_p{q}"] = float(np.percentile(values, q)) if len(values) else 0.0
        return figures

    def plot(self, path: str | Path) -> None:
        """Draw requests and pages over time, as an SVG file."""
        title = "No step was run yet"
        if self.steps:
            share, rate = 100 * self.occupancy, self.tokens_per_second
            title = f"{share:.0f} % of the slots occupied on average, {rate:,.0f} new tokens/s"
        drawn = occupancy_svg(self.steps_log, self._idle.rows(), title)
        Path(path).write_text(drawn, encoding="utf-8")
