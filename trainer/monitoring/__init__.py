"""Checks before the first step, and throughput during training."""

from .flops import ModelFlops
from .preflight import check_run
from .throughput import Meter

__all__ = [
    "Meter",
    "ModelFlops",
    "check_run",
]
