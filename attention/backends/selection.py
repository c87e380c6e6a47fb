"""Which backend serves a call: the first of the preferred order that can, found out by trying.

A backend names its declared limits (`why_not`); whatever passes them must also pass a trial, a
tiny call of the same kind held against the reference, because builds differ in what they left out.
The answer is remembered per kind of call and said once in the log. `backend=`, `force_paged_backend`
or the environment variable NOPAD_ATTENTION forces one by name; one that cannot serve the call then
raises. The environment speaks of calls a backend offers: `triton` reads pages only, `cudnn` none.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import lru_cache

import torch

from ..reference import reference
from ..varlen import Pages, Varlen
from .call_spec import Backend, CallSpec, ScoreParams

log = logging.getLogger("nopad.attention")

_MODULES = {
    "flash3": "flash3",
    "cudnn": "cudnn_ragged",
    "flash2": "flash2",
    "torch": "torch_varlen",
    "triton": "triton_paged",
    "sdpa": "sdpa",
}
NAMES = tuple(_MODULES)
_CPU = ("sdpa",)
_PACKED = ("flash3", "cudnn", "flash2", "torch", "sdpa")
_SHORT_PACKED = ("flash3", "flash2", "cudnn", "torch", "sdpa")
PAGED = ("triton", "flash3", "flash2", "sdpa")
"""Our kernels lead: on an H200 they beat flash-attn 2's paged ones, in decodes and in prefills."""
_COMMON_DIM = 64
"""A head dim that every build of every library serves."""
_PAGE_SIZE = [field.name for field in fields(CallSpec)].index("page_size")
_loaded: dict[str, Backend] = {}


def module(name: str) -> Backend:
    """The backend of that name."""
    if name not in _loaded:
        found = importlib.import_module(f".{_MODULES[name]}", __package__)
        _loaded[name] = found  # pyright: ignore[reportArgumentType]
    return _loaded[name]


def order(ask: CallSpec) -> tuple[str, ...]:
    """Names in order of preference."""
    if ask.device == "cpu":
        return _CPU
    if ask.paged:
        return PAGED
    return _PACKED if ask.many else _SHORT_PACKED


@torch.compiler.assume_constant_result
def select(facts: tuple, forced: str | None = None) -> str:
    """Name the backend that serves a call of these facts, the fields of an `CallSpec` in order."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    paged = facts[_PAGE_SIZE] > 0  # every call comes by here: an Ask costs as much as the rest
    forced = forced or (_reader.get() if paged else None) or _by_environment(paged)
    return _choose(facts, forced, deterministic)


def _by_environment(paged: bool) -> str | None:
    name = os.environ.get("NOPAD_ATTENTION") or None
    known = name in NAMES
    return None if known and not hasattr(module(name), "paged" if paged else "packed") else name


_reader: ContextVar[str | None] = ContextVar("nopad_reader_of_pages", default=None)


@contextmanager
def force_paged_backend(name: str | None) -> Iterator[None]:
    """Use the backend of that name for every call with pages inside; None: the best that can."""
    token = _reader.set(name)
    try:
        yield
    finally:
        _reader.reset(token)


def forced_paged_backend() -> str | None:
    """The backend that calls with pages are to use, where one is asked for by name."""
    return _reader.get() or _by_environment(paged=True)


@lru_cache(maxsize=4096)
def _choose(facts: tuple, forced: str | None, deterministic: bool) -> str:
    ask = CallSpec(*facts)
    if forced is not None:
        if forced not in NAMES:
            raise ValueError(f"no attention backend is called {forced!r}: choose from {NAMES}")
        reason = why_not(forced, ask)
        if reason is not None:
            raise ValueError(f"attention backend {forced!r} cannot serve this call: {reason}")
        return forced
    passed_over = []
    for name in order(ask):
        reason = why_not(name, ask)
        if reason is None:
            _say(name, ask, passed_over)
            return name
        passed_over.append(f"{name} ({reason})")
    raise ValueError(f"no attention backend can serve {ask}: " + "; ".join(passed_over))


def why_not(name: str, ask: CallSpec) -> str | None:
    """Say why a backend cannot serve a call, by its declared limits and by trial."""
    if not hasattr(module(name), "paged" if ask.paged else "packed"):
        return "it reads no pages" if ask.paged else "it reads pages only"
    return module(name).why_not(ask) or _trial(name, ask)


def _say(name: str, ask: CallSpec, passed_over: list[str]) -> None:
    kind = "decode" if ask.decode else "paged" if ask.paged else "packed"
    log.info(
        "attention: %s for %s calls (%s, head dim %d)%s",
        name,
        kind,
        str(ask.dtype).removeprefix("torch."),
        ask.key_dim,
        "; passed over: " + "; ".join(passed_over) if passed_over else "",
    )


def _trial(name: str, ask: CallSpec) -> str | None:
    """Try a backend; where the head dim is what it fails at, the one every build has does not."""
    failure = _failure(name, ask)
    common = replace(ask, key_dim=_COMMON_DIM, value_dim=_COMMON_DIM)
    if failure is None or ask == common or _failure(name, common) is not None:
        return failure
    dims = f"{ask.key_dim}" if ask.key_dim == ask.value_dim else f"{ask.key_dim}/{ask.value_dim}"
    return f"it does not serve head dim {dims} here: {failure}, with {_COMMON_DIM} it was right"


def _failure(name: str, ask: CallSpec) -> str | None:
    """Make a small call of the same kind; an exception or a wrong result is the reason."""
    try:
        # Hooks of our own on what the trial saves: inside gradient checkpointing, the surrounding
        # ones would answer its backward by recomputing the layer that asks.
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.inference_mode(False), torch.set_grad_enabled(ask.grad), plain:
            wrong = _error(module(name), ask)
    except Exception as error:  # a kernel library may raise anything
        line = str(error).strip().splitlines()
        return f"its trial call raised {type(error).__name__}: {line[0] if line else ''}"
    limit = 5e-3 if ask.dtype == torch.float32 else 0.1
    return None if wrong <= limit else f"its trial call was off by {wrong:.2g}"


def _error(backend: Backend, ask: CallSpec) -> float:
    scores = ScoreParams(
        scale=ask.key_dim**-0.5,
        window=3 if ask.window else None,
        softcap=2.0 if ask.softcap else None,
        sinks=_numbers(ask, ask.heads, seed=5) if ask.sinks else None,
    )
    lengths = [1, 1] if ask.decode else [5, 1]
    q, k, v = _inputs(ask, sum(lengths))
    varlen = _varlen(ask, lengths)
    rule = {"window": scores.window, "softcap": scores.softcap, "sinks": scores.sinks}
    if varlen.pages is None:
        got = backend.packed(q, k, v, varlen, scores)
    else:
        got = backend.paged(q, *varlen.pages.cache.layer(0), varlen, scores)
    want = reference(q.float(), k.float(), v.float(), varlen, **rule)
    wrong = _relative(got, want)
    if ask.grad:
        grads = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (got, want))
        wrong = max(wrong, *(_relative(a, b) for a, b in zip(*grads, strict=True)))
    return wrong


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference in units of the largest value: gradients grow with the number of heads."""
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).abs().max() / want.abs().max())


def _inputs(ask: CallSpec, tokens: int):
    shapes = [(ask.heads, ask.key_dim), (ask.kv_heads, ask.key_dim), (ask.kv_heads, ask.value_dim)]
    made = [_numbers(ask, tokens, *shape, seed=i) for i, shape in enumerate(shapes)]
    return [x.requires_grad_(ask.grad) for x in made]


def _numbers(ask: CallSpec, *shape: int, seed: int) -> torch.Tensor:
    """Fixed scattered numbers of unit variance: drawing would move the caller's random state."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), device=ask.device, dtype=torch.float32)
    scattered = torch.sin(count * 12.9898 + seed) * 43758.5453
    return ((scattered - scattered.floor() - 0.5) * 3.46).view(shape).to(ask.dtype)


def _varlen(ask: CallSpec, lengths: list[int]) -> Varlen:
    from ..paging.cache import PagedCache

    def ints(values: list, dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=ask.device)

    cu_seqlens = ints([0, lengths[0], sum(lengths)])
    if not ask.paged:
        return Varlen(cu_seqlens, max(lengths))
    shape = (ask.kv_heads, ask.key_dim, ask.value_dim)
    cache = PagedCache(4, ask.page_size, [shape], ask.dtype, ask.device)
    for seed, tensor in enumerate(cache.layer(0)):
        tensor.copy_(_numbers(ask, *tensor.shape, seed=seed))
    totals = [n + ask.page_size // 2 + 1 for n in lengths]
    slots = ints([-1] * sum(lengths), torch.int64)
    pages = Pages(cache, ints([[2, 1], [3, 0]]), ints(totals), slots, max(totals))
    return Varlen(cu_seqlens, max(lengths), pages)
