"""Running one step on the device: the model, CUDA graphs, sampling, transfers, memory budget."""

from .cuda_graphs import DecodeGraphs
from .model_runner import ModelRunner
from .sampler import gather_logprobs, sample

__all__ = [
    "DecodeGraphs",
    "ModelRunner",
    "gather_logprobs",
    "sample",
]
