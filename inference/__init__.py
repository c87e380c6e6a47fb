"""Continuous-batching generation and scoring on the model that is being trained."""

from .batch_invariant import invariant
from .data_parallel import AllRanks
from .engine import Engine
from .logprob_parity import Agreement, agreement
from .requests.outputs import Completion, Event, Score, TokenLogprob
from .requests.sampling_params import SamplingParams

__all__ = [
    "Agreement",
    "AllRanks",
    "Completion",
    "Engine",
    "Event",
    "SamplingParams",
    "Score",
    "TokenLogprob",
    "agreement",
    "invariant",
]
