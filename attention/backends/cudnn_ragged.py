"""cuDNN's ragged attention through nvidia-cudnn-frontend: packed training rows on Hopper.

On an H200 its kernels take about 0.7 of flash-attn 2's time, forward and backward together. Each
call costs more on the host, so short rows are better served by others (see `choice.order`).

cuDNN plans a graph for one number of sequences and one longest length, which takes about a second.
Rows differ in both, so both go up to a power of two: empty sequences are added at the end, and the
plans in use stay few.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..varlen import Varlen
from .ask import Ask, Scores

_FEWEST, _SHORTEST = 16, 512


@cache
def _load() -> str | None:
    """Register cuDNN's operations once; return why there are none."""
    try:
        import cudnn

        cudnn.sdpa_torch  # noqa: B018 - looking it up registers the operations
    except Exception as missing:
        return f"nvidia-cudnn-frontend is not installed ({type(missing).__name__}: {missing})"
    return None


def why_not(ask: Ask) -> str | None:
    if ask.device != "cuda":
        return "it needs CUDA"
    if torch.cuda.get_device_capability()[0] != 9:
        return "it was tried on Hopper only"
    if ask.sinks or ask.softcap or ask.window:
        return "it is used for plain causal scores only"
    if ask.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {ask.dtype} kernels"
    if max(ask.key_dim, ask.value_dim) > 128 or ask.key_dim % 8 or ask.value_dim % 8:
        return f"head dims {ask.key_dim} and {ask.value_dim} are over 128 or no multiples of 8"
    return _load()


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    """Attend inside each sequence of a packed row."""
    return _forward(q, k, v, varlen.cu_seqlens, varlen.max_length, scores.scale)[0]


@torch.library.custom_op("nopad::cudnn_packed", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp [T, H, 1] that the backward needs."""
    return torch.ops.cudnn.sdpa_fwd(q, k, v, scale, **_rule(cu_seqlens, longest))


@_forward.register_fake
def _(q, k, v, cu_seqlens, longest, scale):
    tokens, heads, _ = q.shape
    sums = q.new_empty(tokens, heads, 1, dtype=torch.float32)
    return q.new_empty(tokens, heads, v.shape[-1]), sums


@torch.library.custom_op("nopad::cudnn_packed_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = _rule(cu_seqlens, longest)
    padded = _by_sequence(sums, rule["cu_seqlens_q"], rule["max_seqlen_q"])
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.ops.cudnn.sdpa_bwd(
        grad, q, k, v, out, padded, scale, is_deterministic=deterministic, **rule
    )


@_gradients.register_fake
def _(grad, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _rule(cu_seqlens: Tensor, longest: int) -> dict:
    """Causal, with as many sequences and as long a longest one as the plan is made for."""
    count, longest = len(cu_seqlens) - 1, _rung(longest, _SHORTEST)
    added = _rung(count, _FEWEST) - count
    bounds = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(added)])
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    return lengths | {"is_causal": True, "max_seqlen_q": longest, "max_seqlen_kv": longest}


def _rung(count: int, least: int) -> int:
    """The power of two that holds `count`.

    >>> [_rung(n, 16) for n in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(least, 1 << (count - 1).bit_length())


def _by_sequence(sums: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Spread [T, H, 1] over [sequences, H, longest, 1], as cuDNN's backward reads it.

    >>> sums, bounds = torch.tensor([1.0, 2, 3])[:, None, None], torch.tensor([0, 2, 3, 3])
    >>> _by_sequence(sums, bounds, 2).tolist()
    [[[[1.0], [2.0]]], [[[3.0], [0.0]]], [[[0.0], [0.0]]]]
    """
    tokens, heads, _ = sums.shape
    place = torch.arange(tokens, device=sums.device, dtype=bounds.dtype)
    sequence = torch.searchsorted(bounds[1:], place, right=True).clamp_(max=len(bounds) - 2)
    spread = sums.new_zeros(len(bounds) - 1, heads, longest, 1)
    spread[sequence, :, place - bounds[sequence], 0] = sums[:, :, 0]
    return spread


def _save(ctx, inputs, output):
    *tensors, longest, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.rule = longest, scale


def _backward(ctx, grad, _):
    q, k, v, cu_seqlens, out, sums = ctx.saved_tensors
    grads = _gradients(grad, q, k, v, out, sums, cu_seqlens, *ctx.rule)
    return *grads, None, None, None


_forward.register_autograd(_backward, setup_context=_save)
