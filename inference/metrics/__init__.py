"""Measurements of the engine: counters and latencies, per-request traces, the occupancy plot."""

from .request_trace import RequestTrace
from .stats import Stats

__all__ = ["RequestTrace", "Stats"]
