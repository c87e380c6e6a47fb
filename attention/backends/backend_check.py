"""Verify a backend at run time: a tiny call of the same kind, compared with the reference.

Builds of one library differ in what they leave out (head dims, dtypes, softcap), so the declared
limits of a backend are not enough: a build is used only if its trial agrees with the reference.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ...runtime import is_out_of_memory
from ..paging.cache import PagedCache
from ..reference import reference
from ..varlen import Pages, Varlen
from .backend import Backend
from .call_spec import CallSpec, ScoreParams

_COMMON_DIM = 64
"""A head dim that every build of every library supports."""


def trial_failure(backend: Backend, spec: CallSpec) -> str | None:
    """Return why a trial call failed; None if it was right.

    If it fails, the common head dim is tried too, so that the reason can name the head dim.
    """
    failure = _failure(backend, spec)
    common = spec._replace(key_dim=_COMMON_DIM, value_dim=_COMMON_DIM)
    if failure is None or spec == common or _failure(backend, common) is not None:
        return failure
    dims = f"{spec.key_dim}"
    if spec.key_dim != spec.value_dim:
        dims += f"/{spec.value_dim}"
    return f"it does not support head dim {dims} here: {failure}, with {_COMMON_DIM} it was right"


def _failure(backend: Backend, spec: CallSpec) -> str | None:
    """Make one trial call; an exception or a wrong result is the reason."""
    try:
        # A thread has none of the caller's states: the hooks of a checkpoint would answer the
        # trial's backward, its modes would keep the trial's outputs, and a custom operator has no
        # autograd at all.
        with ThreadPoolExecutor(1) as thread:
            error = thread.submit(_relative_error, backend, spec).result()
    except Exception as raised:  # a kernel library may raise anything
        if is_out_of_memory(raised):  # says nothing about the backend, and must not be remembered
            raise
        lines = str(raised).strip().splitlines()
        return f"its trial call raised {type(raised).__name__}: {lines[0] if lines else ''}"
    tolerance = 5e-3 if spec.dtype == torch.float32 else 0.1
    return None if error <= tolerance else f"its trial call was off by {error:.2g}"


def _relative_error(backend: Backend, spec: CallSpec) -> float:
    """Largest relative error of the output and, if the call needs them, of the gradients."""
    score_params = ScoreParams(
        scale=spec.key_dim**-0.5,
        window=3 if spec.window else None,
        softcap=2.0 if spec.softcap else None,
        sinks=_numbers(spec, spec.heads, seed=5).requires_grad_(spec.grad) if spec.sinks else None,
        causal=spec.causal,
    )
    torch.set_grad_enabled(spec.grad)
    lengths = [1, 1] if spec.decode else [5, 1]
    q, k, v = _inputs(spec, sum(lengths))
    varlen = _varlen(spec, lengths)
    if varlen.pages is None:
        out = backend.packed(q, k, v, varlen, score_params)
    else:
        keys, values, *scales = varlen.pages.cache.layer(0)
        out = backend.paged(q, keys, values, varlen, score_params, *scales)
    expected = reference(
        q.float(), k.float(), v.float(), varlen,
        window=score_params.window, softcap=score_params.softcap, sinks=score_params.sinks,
        causal=score_params.causal,
    )  # fmt: skip
    error = _relative(out, expected)
    if spec.grad:
        inputs = (q, k, v) if score_params.sinks is None else (q, k, v, score_params.sinks)
        grads = (torch.autograd.grad(x.float().square().sum(), inputs) for x in (out, expected))
        error = max(error, *(_relative(a, b) for a, b in zip(*grads, strict=True)))
    return error


def _relative(x: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest value: gradients grow with the number of heads."""
    x, expected = x.detach().float(), expected.detach().float()
    return float((x - expected).abs().max() / expected.abs().max())


def _inputs(spec: CallSpec, tokens: int) -> list[Tensor]:
    kv_heads = spec.kv_heads
    shapes = [(spec.heads, spec.key_dim), (kv_heads, spec.key_dim), (kv_heads, spec.value_dim)]
    inputs = [_numbers(spec, tokens, *shape, seed=i) for i, shape in enumerate(shapes)]
    return [x.requires_grad_(spec.grad) for x in inputs]


def _numbers(spec: CallSpec, *shape: int, seed: int) -> Tensor:
    """Fixed scattered numbers of unit variance: drawing would change the caller's RNG state."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), device=spec.device, dtype=torch.float32)
    scattered = torch.sin(count * 12.9898 + seed) * 43758.5453
    return ((scattered - scattered.floor() - 0.5) * 3.46).view(shape).to(spec.dtype)


def _varlen(spec: CallSpec, lengths: list[int]) -> Varlen:
    def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=spec.device)

    cu_seqlens = ints([0, lengths[0], sum(lengths)])
    if not spec.paged:
        return Varlen(cu_seqlens, max(lengths))
    shape = (spec.kv_heads, spec.key_dim, spec.value_dim)
    cache = PagedCache(4, spec.page_size, [shape], spec.dtype, spec.device, spec.quantized)
    for seed, tensor in enumerate(cache.layer(0)):
        tensor.copy_(_numbers(spec, *tensor.shape, seed=seed))
    totals = [n + spec.page_size // 2 + 1 for n in lengths]
    kv_slots = ints([-1] * sum(lengths), torch.int64)
    pages = Pages(cache, ints([[2, 1], [3, 0]]), ints(totals), kv_slots, max(totals))
    return Varlen(cu_seqlens, max(lengths), pages)
