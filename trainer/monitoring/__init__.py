"""Checks before the first step; non-finite losses, throughput and FLOPs during training."""

from .finite_check import FiniteCheck, NonFiniteError, check_weights, raise_if_not_finite
from .flops import ModelFlops, expert_fraction
from .packing_difference import measure_images
from .preflight import check_run
from .throughput import ThroughputMeter, tracker_tags

__all__ = [
    "FiniteCheck",
    "ModelFlops",
    "NonFiniteError",
    "ThroughputMeter",
    "check_run",
    "check_weights",
    "expert_fraction",
    "measure_images",
    "raise_if_not_finite",
    "tracker_tags",
]
