"""First-step proof: every attention layer of a model got the metadata of the call, exactly once.

A layer that did not would attend across documents, or beside its cache, without a sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class CallLog:
    """What the attention function saw: one entry per call."""

    calls: list[tuple[int, str, tuple[int, int, int]]] = field(default_factory=list)
    """(layer, where its boundaries came from: "call", "positions" or "rows", (Hkv, Dk, Dv))."""


_witness: ContextVar[CallLog | None] = ContextVar("nopad_witness", default=None)


@contextmanager
def recording() -> Iterator[CallLog]:
    """Record every call of the attention function made inside."""
    witness = CallLog()
    token = _witness.set(witness)
    try:
        yield witness
    finally:
        _witness.reset(token)


def record_call(layer: int, source: str, shape: tuple[int, int, int]) -> None:
    """Tell the watcher, if there is one, of a call."""
    witness = _witness.get()
    if witness is not None:
        witness.calls.append((layer, source, shape))


@contextmanager
def check_every_layer(model: nn.Module, *, positions_suffice: bool = False) -> Iterator[None]:
    """Raise unless every attention layer is called once inside, each with its metadata.

    positions_suffice: accept layers that found the boundaries by restarting positions, as the few
        models that drop keywords do in training; never enough for pages.
    """
    with recording() as witness:
        yield
    seen = Counter(layer for layer, _, _ in witness.calls)
    enough = ("call", "positions") if positions_suffice else ("call",)
    blind = sorted({layer for layer, source, _ in witness.calls if source not in enough})
    missing = sorted(set(attention_layers(model)) - set(seen))
    twice = sorted(layer for layer, count in seen.items() if count > 1)
    name = type(model).__name__
    if blind:
        raise ValueError(f"{name}: layers {blind} did not receive the sequence boundaries")
    if missing or not seen:
        raise ValueError(
            f"{name}: layers {missing or 'all'} never called the attention function: "
            'is attn_implementation="nopad" set on the model?'
        )
    if twice:
        raise ValueError(f"{name}: layers {twice} attend more than once per step: not supported")


def attention_layers(model: nn.Module) -> list[int]:
    """Indices of the layers that attend: those of the modules that project queries.

    A module counts where it carries the layer index and the scale or causality the interface reads.
    """
    found = set()
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        attends = hasattr(module, "is_causal") or hasattr(module, "scaling")
        if isinstance(index, int) and attends:
            found.add(index)
    return sorted(found)
