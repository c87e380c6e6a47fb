"""Checks before the first step, and throughput during training."""

from .flops import ModelFlops
from .preflight import check_run
from .throughput import ThroughputMeter

__all__ = [
    "ModelFlops",
    "ThroughputMeter",
    "check_run",
]
