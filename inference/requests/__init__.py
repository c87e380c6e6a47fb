"""Prompts to requests, and sampled tokens to completions, scores and stream events."""

from .detokenizer import Detokenizer
from .output_processor import OutputProcessor, RequestGroup
from .outputs import Completion, Score, StreamEvent, TokenLogprob
from .request import Request
from .request_builder import RequestBuilder
from .sampling_params import SamplingParams
from .tokenizer_adapter import TokenizerAdapter

__all__ = [
    "Completion",
    "Detokenizer",
    "OutputProcessor",
    "Request",
    "RequestBuilder",
    "RequestGroup",
    "SamplingParams",
    "Score",
    "StreamEvent",
    "TokenLogprob",
    "TokenizerAdapter",
]
