"""`RequestTrace`: record the events of each request; write them as JSON lines or for Perfetto."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

_PHASES = {
    "queued": "waiting",
    "admitted": "prefill",
    "resumed": "prefill",
    "prefilled": "decode",
    "preempted": "waiting",
}
"""Phase that starts with each event."""


class RequestTrace:
    """Events of the latest call, the newest if there are many; never prompts or text."""

    def __init__(self, limit: int = 200_000, clock: Callable[[], float] = perf_counter):
        self.events: deque[tuple[float, int, str, dict[str, Any]]] = deque(maxlen=limit)
        """(time, request id, event, details)."""
        self.dropped = 0
        self._clock = clock

    def add(self, request_id: int, event: str, **details: Any) -> None:
        """Record an event of a request."""
        self.dropped += len(self.events) == self.events.maxlen
        self.events.append((self._clock(), request_id, event, details))

    def clear(self) -> None:
        """Drop all events."""
        self.events.clear()
        self.dropped = 0

    def write_jsonl(self, path: str | Path) -> None:
        """Write one JSON object per line: time, request, event and its details."""
        lines = (
            json.dumps({"time": time, "request": request_id, "event": event, **details})
            for time, request_id, event, details in self.events
        )
        Path(path).write_text("".join(line + "\n" for line in lines))

    def write_chrome(self, path: str | Path) -> None:
        """Write the phases as spans, one row per request, for chrome://tracing or Perfetto."""
        spans, open_phases = [], {}
        for time, request_id, event, details in self.events:
            if request_id in open_phases:
                start, phase, phase_details = open_phases.pop(request_id)
                spans.append(_span(request_id, phase, start, time, phase_details))
            if event in _PHASES:
                open_phases[request_id] = (time, _PHASES[event], details)
            elif event == "finished":
                name = f"finished: {details.get('why')}"
                spans.append(_span(request_id, name, time, time, details))
        Path(path).write_text(json.dumps({"traceEvents": spans}))


def _span(request_id: int, name: str, start: float, end: float, details: dict[str, Any]) -> dict:
    return {
        "name": name,
        "ph": "X",
        "pid": 0,
        "tid": request_id,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": details,
    }
