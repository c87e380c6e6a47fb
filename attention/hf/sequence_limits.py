"""Longest sequence that may share a call with others; freeze length-dependent rotary embeddings.

Rotary embeddings that depend on the length (dynamic NTK, longrope): Transformers takes the length
from the largest position of the whole call and keeps the chosen frequencies on the module, so that
one long sequence changes all others. Up to the original context nothing depends on the length.

    Phi-3.5, original context 4096:   [4000 | 90] right   [4000 | 5000] refused   [5000] right

Attention in chunks (Llama 4) is causal inside the first chunk; beyond it, it is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn


class SequenceLimit(NamedTuple):
    """The longest sequence that a call may mix with others."""

    length: int
    reason: str
    alone: bool
    """Whether a longer sequence is right if it is the only one of the call."""


def sequence_limit(config: Any) -> SequenceLimit | None:
    """Return the limit of a model under `nopad`; None if it has none. config: of the text model."""
    limits = [limit for limit in (rotary_limit(config), _chunk_limit(config)) if limit is not None]
    return min(limits, default=None)


def rotary_limit(config: Any) -> SequenceLimit | None:
    """Return the limit of rotary embeddings that depend on the length, under any attention."""
    limits = []
    for parameters in rope_parameters(config):
        rope_type = parameters["rope_type"]
        if rope_type == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limits.append((original or config.original_max_position_embeddings, rope_type))
        elif "dynamic" in rope_type and not parameters.get("alpha"):  # HunYuan's alpha fixes them
            limits.append((config.max_position_embeddings, rope_type))
    if not limits:
        return None
    length, rope_type = min(limits)
    reason = f"its rotary embedding ({rope_type}) depends on the length beyond {length} tokens"
    return SequenceLimit(length, reason, alone=True)


def _chunk_limit(config: Any) -> SequenceLimit | None:
    chunk = getattr(config, "attention_chunk_size", None)
    if not chunk or "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return SequenceLimit(chunk, f"it attends in chunks of {chunk} tokens", alone=False)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a model, or those of each of its layer types."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    candidates = [parameters, *parameters.values()]
    return [each for each in candidates if isinstance(each, dict) and each.get("rope_type")]


@contextmanager
def frozen_rotary(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make rotary embeddings use the frequencies of the original context, and keep nothing.

    On exit the modules have the frequencies of the caller's last forward again.
    """
    varying = [
        module
        for module in modules
        if (rope_type := module.__dict__.get("rope_type")) is not None and _varies(rope_type)
    ]
    before = [(module, module.rope_type, module._buffers.copy()) for module in varying]
    try:
        for module in varying:
            _freeze(module)
        yield
    finally:
        for module, rope_type, buffers in before:
            vars(module)["rope_type"] = rope_type
            module._buffers.update(buffers)


def _freeze(module: Any) -> None:
    """Declare the original frequencies to be ones that never change."""
    by_layer = isinstance(module.rope_type, dict)
    for prefix in [f"{name}_" for name in module.rope_type] if by_layer else [""]:
        current = module._buffers.get(f"{prefix}inv_freq")
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if current is not None and original is not None:
            if original.device != current.device:  # a plain attribute does not follow `to(...)`
                original = original.to(current.device)
                setattr(module, f"{prefix}original_inv_freq", original)
            module._buffers[f"{prefix}inv_freq"] = original
    module.rope_type = dict.fromkeys(module.rope_type, "default") if by_layer else "default"


def _varies(rope_type: Any) -> bool:
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(t, str) and (t == "longrope" or "dynamic" in t) for t in types)
