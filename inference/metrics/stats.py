"""Counters and latencies of the engine: occupancy, cache use, TTFT, inter-token latency.

Counters run until `reset()`. Only the newest tens of thousands of steps and latencies are kept, so
a long-lived engine uses constant memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..requests.request import Request
from .occupancy_plot import write_occupancy_plot

if TYPE_CHECKING:
    from ..scheduling.scheduler import Scheduler
    from ..scheduling.step import Step


class RingBuffer:
    """The newest `limit` rows of those added.

    >>> buffer = RingBuffer(limit=3)
    >>> buffer.add(np.array([1.0, 2.0])); buffer.add(np.array([3.0, 4.0]))
    >>> buffer.rows().tolist()
    [2.0, 3.0, 4.0]
    """

    def __init__(self, *shape: int, limit: int = 1 << 16):
        self._rows = np.empty((limit, *shape))
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, len(self._rows))

    def add(self, rows: np.ndarray | Sequence[Any]) -> None:
        """Append rows; the oldest are overwritten."""
        limit = len(self._rows)
        rows = rows[-limit:]
        start = self._num_added % limit
        num_before_end = min(len(rows), limit - start)
        self._rows[start : start + num_before_end] = rows[:num_before_end]
        if num_before_end < len(rows):
            self._rows[: len(rows) - num_before_end] = rows[num_before_end:]
        self._num_added += len(rows)

    def rows(self) -> np.ndarray:
        """The rows, oldest first."""
        if self._num_added <= len(self._rows):
            return self._rows[: self._num_added]
        return np.roll(self._rows, -(self._num_added % len(self._rows)), axis=0)


class Stats:
    """What the engine did since it was made or `reset()` was called."""

    def __init__(self) -> None:
        self._counted: WeakKeyDictionary[Scheduler, tuple[int, int, int]] = WeakKeyDictionary()
        """A scheduler's counters at its last step; they are not reset with these."""
        self._queued_at: dict[int, float] = {}
        """When each unfinished request was queued; kept through a reset."""
        self._row_queued_at = np.empty(0)
        """By batch row: when its request was queued."""
        self._row_last_token_at = np.empty(0)
        """By batch row: when its request's newest token arrived."""
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        self.steps = 0
        self.num_computed_tokens = 0
        """Tokens that went through the model."""
        self.padded_rows = 0
        """Rows of CUDA graphs without a request."""
        self.graph_steps = 0
        self.graphs_captured = 0
        self.new_tokens = 0
        self.drafted_tokens = 0
        """Draft tokens that steps verified; with `speculate`."""
        self.accepted_tokens = 0
        """Of these, those that were sampled too."""
        self.finished: dict[str, int] = {}
        """Finished requests by reason."""
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.admitted_tokens = 0
        self.step_seconds = 0.0
        """Time spent in steps, from planning to reading; time between steps does not count."""
        self.setup_seconds = 0.0
        """Time to allocate the cache, and to compile and verify kernels."""
        self.capture_seconds = 0.0
        """Time to capture CUDA graphs, inside the first steps that need them."""
        self._steps_log = RingBuffer(7)
        self._idle_since = RingBuffer()
        self._queue_time, self._ttft, self._itl = RingBuffer(), RingBuffer(), RingBuffer()

    def record_queued(self, request: Request, now: float) -> None:
        self._queued_at[request.id] = now

    def record_admitted(self, request: Request, now: float) -> None:
        row = request.row
        if row >= len(self._row_last_token_at):
            new = np.full(row + 1 - len(self._row_last_token_at), np.nan)
            self._row_last_token_at = np.append(self._row_last_token_at, new)
            self._row_queued_at = np.append(self._row_queued_at, new)
        queued_at = self._queued_at.get(request.id, now)
        self._row_queued_at[row] = queued_at
        self._row_last_token_at[row] = now if request.output_token_ids else np.nan
        if not request.num_preemptions:
            self._queue_time.add([now - queued_at])

    def record_step_time(self, seconds: float) -> None:
        self.step_seconds += seconds

    def record_step(self, now: float, step: Step, scheduler: Scheduler) -> None:
        num_tokens, num_running = len(step.token_ids), len(step.requests)
        self.steps += 1
        self.num_computed_tokens += num_tokens
        pages = scheduler.pages
        used_pages = pages.num_pages - pages.available
        # `max_num_seqs` may have been lowered below the number that runs.
        max_running = max(scheduler.max_num_seqs, num_running)
        entry = (now, num_running, scheduler.num_waiting, num_tokens, used_pages, max_running)
        self._steps_log.add([(*entry, pages.num_pages)])
        counters = (
            scheduler.num_preemptions,
            scheduler.num_prefix_hit_tokens,
            scheduler.num_admitted_tokens,
        )
        before = self._counted.get(scheduler, (0, 0, 0))
        self.preemptions += counters[0] - before[0]
        self.prefix_hit_tokens += counters[1] - before[1]
        self.admitted_tokens += counters[2] - before[2]
        self._counted[scheduler] = counters

    def record_graph_step(self, num_padded: int, num_captured: int) -> None:
        self.graph_steps += 1
        self.padded_rows += num_padded
        self.graphs_captured = num_captured

    def record_tokens(self, rows: np.ndarray, now: float) -> None:
        """Count a step's tokens as they reach the host; no Python per request."""
        self.new_tokens += len(rows)
        rows = np.unique(rows)  # accepted drafts arrive together
        if len(self._row_last_token_at) == 0:
            return
        last = self._row_last_token_at[rows]
        is_first = np.isnan(last)
        if is_first.any():
            self._ttft.add(now - self._row_queued_at[rows[is_first]])
        self._itl.add(now - last[~is_first])
        self._row_last_token_at[rows] = now

    def record_finish(self, request: Request, now: float) -> None:
        reason = request.finish_reason or "error"
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._queued_at.pop(request.id, None)
        if not self._queued_at:
            self._idle_since.add([now])

    @property
    def steps_log(self) -> np.ndarray:
        """One row per step, oldest first: (time, running, waiting, tokens, used pages,
        max_num_seqs, pages)."""
        return self._steps_log.rows()

    @property
    def occupancy(self) -> float:
        """Mean fraction of `max_num_seqs` that ran, over steps."""
        log = self.steps_log
        return float((log[:, 1] / log[:, 5]).mean()) if self.steps else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Largest fraction of the pages in use."""
        log = self.steps_log
        return float((log[:, 4] / log[:, 6]).max(initial=0))

    @property
    def padding(self) -> float:
        """Fraction of the computed tokens that belong to no request."""
        return self.padded_rows / max(self.padded_rows + self.num_computed_tokens, 1)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Fraction of the admitted tokens that were found in the prefix cache."""
        return self.prefix_hit_tokens / max(self.admitted_tokens, 1)

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the draft tokens that were accepted."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time spent in steps."""
        return self.new_tokens / self.step_seconds if self.step_seconds else 0.0

    def summary(self) -> dict[str, float]:
        """All figures as one flat dictionary for a logger; times in seconds."""
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
            "acceptance_rate": self.acceptance_rate,
            "setup_seconds": self.setup_seconds,
            "capture_seconds": self.capture_seconds,
            "preemptions": self.preemptions,
        }
        figures |= {f"finished_{reason}": n for reason, n in self.finished.items()}
        latencies = {"queue_time": self._queue_time, "ttft": self._ttft, "itl": self._itl}
        for name, buffer in latencies.items():
            values = buffer.rows()
            for q in (50, 95, 99):
                figures[f"{name}_p{q}"] = float(np.percentile(values, q)) if len(values) else 0.0
        return figures

    def plot(self, path: str | Path) -> None:
        """Plot requests and pages over time, as SVG unless the suffix (.png, .pdf) says otherwise.

        Needs matplotlib, which the extra `bench` installs.
        """
        title = "No step was run yet"
        if self.steps:
            occupancy, rate = 100 * self.occupancy, self.tokens_per_second
            title = f"{occupancy:.0f} % of max_num_seqs on average, {rate:,.0f} new tokens/s"
        write_occupancy_plot(path, self.steps_log, self._idle_since.rows(), title)
