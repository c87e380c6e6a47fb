"""Continuous-batching generation and scoring on the model that is being trained."""

from .completion import Completion, Event, Score, TokenLogprob
from .engine import Engine
from .params import SamplingParams

__all__ = ["Completion", "Engine", "Event", "SamplingParams", "Score", "TokenLogprob"]
