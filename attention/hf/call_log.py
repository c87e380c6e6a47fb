"""Record attention calls, or let attention return zeros; check that each layer was called once.

A layer without its sequence boundaries would attend across documents, or ignore its cache, without
any error.
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
    """The calls of the attention function."""

    calls: list[tuple[int, str, tuple[int, int, int]]] = field(default_factory=list)
    """(layer, source of its boundaries: "call", "positions" or "rows", (Hkv, Dk, Dv))."""
    silent: bool = False
    """Whether attention returns zeros: what still passes between tokens then passes beside it."""


_active_log: ContextVar[CallLog | None] = ContextVar("nopad_call_log", default=None)


@contextmanager
def recording(silent: bool = False) -> Iterator[CallLog]:
    """Record every call of the attention function inside; silent: it returns zeros."""
    log = CallLog(silent=silent)
    token = _active_log.set(log)
    try:
        yield log
    finally:
        _active_log.reset(token)


def is_recording() -> bool:
    """Return whether calls are recorded: the model is being examined, not used."""
    return _active_log.get() is not None


def record_call(layer: int, source: str, shape: tuple[int, int, int]) -> bool:
    """Add a call to the active log, if there is one; return whether attention is silent."""
    log = _active_log.get()
    if log is None:
        return False
    log.calls.append((layer, source, shape))
    return log.silent


@contextmanager
def check_every_layer(model: nn.Module) -> Iterator[None]:
    """Raise unless every attention layer is called exactly once inside, with its boundaries."""
    with recording() as log:
        yield
    counts = Counter(layer for layer, _, _ in log.calls)
    uninformed = sorted({layer for layer, source, _ in log.calls if source != "call"})
    missing = sorted(set(attention_layers(model)) - set(counts))
    repeated = sorted(layer for layer, count in counts.items() if count > 1)
    name = type(model).__name__
    if uninformed:
        raise ValueError(f"{name}: layers {uninformed} did not receive the sequence boundaries")
    if missing or not counts:
        raise ValueError(
            f"{name}: layers {missing or 'all'} never called the attention function: "
            'is attn_implementation="nopad" set on the model?'
        )
    if repeated:
        raise ValueError(
            f"{name}: layers {repeated} attend more than once per step, which is not supported"
        )


def attention_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers that attend.

    A module counts if it has the layer index and the scale or causality that the interface reads.
    """
    layers = set()
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and attends(module):
            layers.add(index)
    return sorted(layers)


def attends(module: nn.Module) -> bool:
    """Return whether a module has the scale or causality that the interface reads."""
    return hasattr(module, "is_causal") or hasattr(module, "scaling")
