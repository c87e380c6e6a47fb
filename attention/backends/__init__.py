"""The implementations behind `attend`, and the selection of one for each call."""

from ..scores import ScoreParams
from .call_spec import CallSpec, NotCapturable
from .sdpa import without_prefix_sharing
from .selection import (
    BACKENDS,
    MODULES,
    PAGED_BACKENDS,
    force_backend,
    force_paged_backend,
    forced_paged_backend,
    select,
    without_trials,
)

__all__ = [
    "BACKENDS",
    "MODULES",
    "PAGED_BACKENDS",
    "CallSpec",
    "NotCapturable",
    "ScoreParams",
    "force_backend",
    "force_paged_backend",
    "forced_paged_backend",
    "select",
    "without_prefix_sharing",
    "without_trials",
]
