"""Backend selection: the first backend in the order of preference that supports a call.

A backend rules calls out by its declared limits (`limit_reason`); a call that passes them
must also pass a trial (`backend_check.py`). The result is cached per `CallSpec` and logged once.

A backend can be forced by name, in this order of precedence; if it does not support the call, the
call raises:

    attend(backend=)            one call
    force_paged_backend(name)   calls with pages, inside the context
    force_backend(name)         all calls, inside the context
    NOPAD_ATTENTION=name        the process, for the kinds of calls that the backend has at all:
                                `triton` only reads pages, `cudnn` never does
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from . import cudnn_ragged, flash2, sdpa, torch_varlen, triton_packed, triton_paged
from .backend_check import trial_failure
from .call_spec import CallSpec

log = logging.getLogger("nopad.attention")

BACKEND_MODULES: dict[str, Any] = {
    "cudnn": cudnn_ragged,
    "flash2": flash2,
    "torch": torch_varlen,
    "triton": triton_paged,
    "triton_packed": triton_packed,
    "sdpa": sdpa,
}
"""The `Backend` of each name."""
BACKENDS = tuple(BACKEND_MODULES)
_CPU = ("sdpa",)
_LARGE_PACKED = ("cudnn", "flash2", "torch", "sdpa", "triton_packed")
_PACKED = ("flash2", "cudnn", "torch", "sdpa", "triton_packed")
"""`triton_packed` comes after sdpa, which supports every call, so it runs only if forced: its
kernels passed their tests in Triton's interpreter alone."""
PAGED_BACKENDS = ("triton", "flash2", "sdpa")
"""Our kernels come first: on an H200 they beat flash-attn 2's in paged decodes and prefills."""

_forced: ContextVar[str | None] = ContextVar("nopad_forced_backend", default=None)
_forced_paged: ContextVar[str | None] = ContextVar("nopad_forced_paged_backend", default=None)
_trials: ContextVar[bool] = ContextVar("nopad_backend_trials", default=True)


@contextmanager
def force_backend(name: str | None) -> Iterator[None]:
    """Use the backend of that name for every call inside; None: the first that supports it."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def force_paged_backend(name: str | None) -> Iterator[None]:
    """Use the backend of that name for every call with pages inside; None: no backend is forced."""
    token = _forced_paged.set(name)
    try:
        yield
    finally:
        _forced_paged.reset(token)


def forced_paged_backend() -> str | None:
    """Return the backend that calls with pages are forced to use, if there is one."""
    return _forced_backend(paged=True)


@contextmanager
def without_trials() -> Iterator[None]:
    """Inside, trust the declared limits alone: no trial call is made and no choice is cached."""
    token = _trials.set(False)
    try:
        yield
    finally:
        _trials.reset(token)


def preference(spec: CallSpec) -> tuple[str, ...]:
    """Return the names of backends, best first."""
    if spec.device == "cpu":
        return _CPU
    if spec.paged:
        return PAGED_BACKENDS
    return _LARGE_PACKED if spec.large else _PACKED


def select_backend(spec: CallSpec, forced: str | None = None) -> str:
    """Return the name of the backend that serves a call."""
    if torch.compiler.is_compiling():
        return _select_while_tracing(forced, *spec)
    return _select_now(spec, forced)


@torch.compiler.assume_constant_result
def _select_while_tracing(forced: str | None, *fields: Any) -> str:
    """Select at trace time: torch.compile takes plain arguments and the result as constants."""
    return _select_now(CallSpec(*fields), forced)


def _select_now(spec: CallSpec, forced: str | None) -> str:
    forced = forced or _forced_backend(spec.page_size > 0)
    if not _trials.get():
        return forced or _select_without_trials(spec)
    return _cached_choice(spec, forced, torch.are_deterministic_algorithms_enabled())


def _forced_backend(paged: bool) -> str | None:
    forced = (_forced_paged.get() if paged else None) or _forced.get()
    if forced is not None:
        return forced
    name = os.environ.get("NOPAD_ATTENTION") or None
    lacks_kind = name in BACKENDS and name not in (PAGED_BACKENDS if paged else _PACKED)
    return None if lacks_kind else name


@lru_cache(maxsize=4096)
def _cached_choice(spec: CallSpec, forced: str | None, deterministic: bool) -> str:
    if forced is not None:
        if forced not in BACKENDS:
            raise ValueError(f"no attention backend is called {forced!r}: choose from {BACKENDS}")
        reason = backend_reason(forced, spec)
        if reason is not None:
            raise ValueError(f"attention backend {forced!r} does not support this call: {reason}")
        return forced
    skipped = []
    for name in preference(spec):
        reason = backend_reason(name, spec)
        if reason is None:
            _log_choice(name, spec, skipped)
            return name
        skipped.append(f"{name} ({reason})")
    raise ValueError(f"no attention backend supports {spec}: " + "; ".join(skipped))


def _select_without_trials(spec: CallSpec) -> str:
    for name in preference(spec):
        if _declared_limit(name, spec) is None:
            return name
    raise ValueError(f"no attention backend supports {spec}")


def backend_reason(name: str, spec: CallSpec) -> str | None:
    """Return why a backend does not support a call, by its declared limits and by trial."""
    return _declared_limit(name, spec) or trial_failure(BACKEND_MODULES[name], spec)


def _declared_limit(name: str, spec: CallSpec) -> str | None:
    if name not in (PAGED_BACKENDS if spec.paged else _PACKED):
        return "it does not read pages" if spec.paged else "it only reads pages"
    return BACKEND_MODULES[name].limit_reason(spec)


def _log_choice(name: str, spec: CallSpec, skipped: list[str]) -> None:
    log.info(
        "attention: %s for %s calls (%s, head dim %d)%s",
        name,
        "decode" if spec.decode else "paged" if spec.paged else "packed",
        str(spec.dtype).removeprefix("torch."),
        spec.key_dim,
        "; skipped: " + "; ".join(skipped) if skipped else "",
    )
