"""The implementations behind `attend`, and the selection of one for each call."""

from .call_spec import CallSpec, NotCapturable, ScoreParams
from .sdpa import without_prefix_sharing
from .selection import (
    BACKEND_MODULES,
    BACKENDS,
    PAGED_BACKENDS,
    force_backend,
    force_paged_backend,
    forced_paged_backend,
    select_backend,
    without_trials,
)

__all__ = [
    "BACKENDS",
    "BACKEND_MODULES",
    "PAGED_BACKENDS",
    "CallSpec",
    "NotCapturable",
    "ScoreParams",
    "force_backend",
    "force_paged_backend",
    "forced_paged_backend",
    "select_backend",
    "without_prefix_sharing",
    "without_trials",
]
