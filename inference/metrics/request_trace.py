"""What happened to each request, and when: JSON lines, or a file for Perfetto."""

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


class RequestTrace:
    """Moments of the latest call, the newest if they are many; never prompts or texts."""

    def __init__(self, limit: int = 200_000, clock: Callable[[], float] = perf_counter):
        self.events: deque[tuple[float, int, str, dict[str, Any]]] = deque(maxlen=limit)
        self.dropped = 0
        self._clock = clock

    def add(self, request: int, what: str, **detail: Any) -> None:
        """Note a moment of a request's life."""
        self.dropped += len(self.events) == self.events.maxlen
        self.events.append((self._clock(), request, what, detail))

    def clear(self) -> None:
        """Forget everything noted so far."""
        self.events.clear()
        self.dropped = 0

    def write_jsonl(self, path: str | Path) -> None:
        """Write one JSON object a line: time, request, event and its details."""
        lines = (
            json.dumps({"time": time, "request": request, "event": what, **detail})
            for time, request, what, detail in self.events
        )
        Path(path).write_text("".join(line + "\n" for line in lines))

    def write_chrome(self, path: str | Path) -> None:
        """Write the events as spans, one row per request, for chrome://tracing or Perfetto."""
        spans, since = [], {}
        for time, request, what, detail in self.events:
            if request in since:
                begun, phase, before = since.pop(request)
                spans.append(_span(request, phase, begun, time, before))
            if what in _PHASES:
                since[request] = (time, _PHASES[what], detail)
            elif what == "finished":
                spans.append(_span(request, f"finished: {detail.get('why')}", time, time, detail))
        Path(path).write_text(json.dumps({"traceEvents": spans}))


def _span(request: int, name: str, begun: float, ended: float, detail: dict[str, Any]) -> dict:
    return {
        "name": name,
        "ph": "X",
        "pid": 0,
        "tid": request,
        "ts": begun * 1e6,
        "dur": (ended - begun) * 1e6,
        "args": detail,
    }
