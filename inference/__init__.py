"""Continuous-batching generation and scoring on the model that is being trained."""

from .batch_invariant import batch_invariant
from .data_parallel import DataParallelEngine
from .engine import Engine
from .logprob_parity import LogprobParity, LogprobParityEval, compare_logprobs
from .requests.outputs import Completion, Score, StreamEvent, TokenLogprob
from .requests.sampling_params import SamplingParams

__all__ = [
    "Completion",
    "DataParallelEngine",
    "Engine",
    "LogprobParity",
    "LogprobParityEval",
    "SamplingParams",
    "Score",
    "StreamEvent",
    "TokenLogprob",
    "batch_invariant",
    "compare_logprobs",
]
