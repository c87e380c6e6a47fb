"""A lower bound of the time that a workload takes, from the model's shape and two ceilings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from nopad.attention import layer_shapes
from nopad.trainer.monitoring import ModelFlops, expert_fraction

from .workloads import Workload


def floor_seconds(
    model: Any, work: Workload, bandwidth: float, matrix_rate: float, kv_bytes: float | None = None
) -> float:
    """Return a lower bound of the time, with all requests running in parallel.

    Prefill runs at the matrix rate and gives each request its first token. A decode step takes the
    time of its products at the matrix rate, or that of reading weights, keys and values at the copy
    bandwidth, whichever is longer.

    Args:
        bandwidth: bytes per second.
        matrix_rate: FLOPs per second.
        kv_bytes: bytes of a number in the KV cache; default: those of a weight.
    """
    prompts, new = np.array([len(p) for p in work.prompts], dtype=float), np.array(work.new)
    forward, weight_bytes = _ForwardCost.of(model), next(model.parameters()).element_size()
    seconds = forward.prefill_flops(prompts) / matrix_rate
    for step in range(1, int(new.max())):
        lengths = prompts[new > step] + step  # the keys of each request, the new one included
        read = weight_bytes * forward.weights_read(len(lengths))
        read += (kv_bytes or weight_bytes) * forward.cache_read(lengths)
        seconds += max(read / bandwidth, forward.decode_flops(lengths) / matrix_rate)
    return seconds


@dataclass(frozen=True, slots=True)
class _ForwardCost:
    """What forwards of a model compute and read."""

    training: ModelFlops
    """The FLOPs of forward and backward, three times those of the forward."""
    head_flops: float
    """Those of a forward that only tokens with logits need."""
    layers: list[tuple[float, int]]
    """Keys that a query sees at most, and numbers in the cache per key, of each layer."""
    dense_weights: int
    expert_weights: int
    expert_fraction: float
    """The fraction of a layer's experts that one token needs."""

    @classmethod
    def of(cls, model: Any) -> _ForwardCost:
        flops, head = ModelFlops.from_model(model), model.get_output_embeddings().weight
        shapes = [
            heads * (key_dim + value_dim) for heads, key_dim, value_dim in layer_shapes(model)
        ]
        windows = [float("inf") if window is None else window for window in flops.windows]
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        embedding = model.get_input_embeddings().weight
        looked_up = 0 if embedding is head else embedding.numel()
        return cls(
            training=flops,
            head_flops=2 * head.numel(),
            layers=list(zip(windows, shapes, strict=True)),
            dense_weights=sum(sizes.values()) - experts - looked_up,
            expert_weights=experts,
            expert_fraction=expert_fraction(model.config.get_text_config()),
        )

    def prefill_flops(self, lengths: np.ndarray) -> float:
        without_logits = lengths.sum() - len(lengths)
        return self.training.step_flops(lengths) / 3 - self.head_flops * without_logits

    def decode_flops(self, lengths: np.ndarray) -> float:
        pairs = sum(np.minimum(lengths, window).sum() for window, _ in self.layers)
        return (self.training.per_token * len(lengths) + self.training.per_pair * pairs) / 3

    def cache_read(self, lengths: np.ndarray) -> float:
        """Return how many numbers a decode step reads from the cache."""
        return sum(size * np.minimum(lengths, window).sum() for window, size in self.layers)

    def weights_read(self, tokens: int) -> float:
        """Return how many weights a decode step reads; experts are those of uniform routing.

        A token does not need an expert with probability 1 - fraction, independent of the others.
        """
        touched = 1 - (1 - self.expert_fraction) ** tokens
        return self.dense_weights + self.expert_weights * touched
