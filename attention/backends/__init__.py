"""The implementations behind `attend`, and the selection of one for each call."""

from .call_spec import CallSpec, NotCapturable, ScoreParams
from .selection import PAGED, force_paged_backend, forced_paged_backend

__all__ = [
    "PAGED",
    "CallSpec",
    "NotCapturable",
    "ScoreParams",
    "force_paged_backend",
    "forced_paged_backend",
]
