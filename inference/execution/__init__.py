"""Running one step on the device: the model, CUDA graphs, sampling, transfers, memory budget."""

from .cuda_graphs import StepGraphs
from .model_runner import ModelRunner
from .sampler import gather_logprobs, sample

__all__ = [
    "ModelRunner",
    "StepGraphs",
    "gather_logprobs",
    "sample",
]
