"""Generating from a model that is being trained: borrow it, and notice when its weights change."""

from .borrow import borrow_model
from .cast_weights import CastWeights
from .lockstep import lockstep
from .patches import Patches
from .weights_version import WeightsVersion

__all__ = [
    "CastWeights",
    "Patches",
    "WeightsVersion",
    "borrow_model",
    "lockstep",
]
