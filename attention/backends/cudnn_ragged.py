"""cuDNN's ragged attention through nvidia-cudnn-frontend: packed training rows on Hopper.

On an H200 its kernels take about 0.7 of flash-attn 2's time, forward and backward together. Each
call costs more on the host, so short rows are better served by others (see `choice.order`).

cuDNN plans a graph for one number of sequences and one longest length, which takes about a second.
Rows differ in both, so both go up to a power of two: empty sequences are added at the end, and the
plans in use stay few; the backward's number of tokens goes up by less. Where sequences lie is
worked out once a batch.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..varlen import Varlen
from . import cudnn_graph
from .call_spec import CallSpec, ScoreParams
from .cudnn_graph import Ragged, Shape

_FEWEST, _SHORTEST, _TOKENS = 16, 512, 1024


@cache
def _load() -> str | None:
    """Look once whether it is there; return why not."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception as missing:
        return f"nvidia-cudnn-frontend is not installed ({type(missing).__name__}: {missing})"
    return None


def why_not(ask: CallSpec) -> str | None:
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


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    return _forward(q, k, v, varlen.cu_seqlens, varlen.max_length, scores.scale)[0]


@torch.library.custom_op("nopad::cudnn_packed", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp [T, H, 1] that the backward needs."""
    _begin()
    q, k, v = map(_dense, (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    sums = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
    graph = cudnn_graph.attend(_shape(q, k, v, len(cu_seqlens) - 1, longest, scale))
    graph.run({"q": q, "k": k, "v": v, "out": out, "sums": sums}, _ragged(cu_seqlens))
    return out, sums


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
    q, k, v, grad = map(_dense, (q, k, v, grad.contiguous()))
    shape = replace(
        _shape(q, k, v, len(cu_seqlens) - 1, longest, scale),
        tokens=_step(len(q)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "out": out, "sums": sums, "grad": grad}
    made = {"d q": d_q, "d k": d_k, "d v": d_v}
    cudnn_graph.gradients(shape).run(given | made, _ragged(cu_seqlens))
    _end()
    return d_q, d_k, d_v


@_gradients.register_fake
def _(grad, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _shape(q: Tensor, k: Tensor, v: Tensor, sequences: int, longest: int, scale: float) -> Shape:
    """What to plan for: few plans serve all rows."""
    return Shape(
        device=q.device,
        dtype=q.dtype,
        sequences=_rung(sequences, _FEWEST),
        longest=_rung(longest, _SHORTEST),
        q=_layout(q),
        k=_layout(k),
        v=_layout(v),
        scale=scale,
    )


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    return x.shape[1], x.shape[2], x.stride(0), x.stride(1)


def _rung(count: int, least: int) -> int:
    """The power of two that holds `count`.

    >>> [_rung(n, 16) for n in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(least, 1 << (count - 1).bit_length())


def _step(tokens: int) -> int:
    """The next eighth of the power of two that holds `tokens`: few, and not much more room.

    >>> [_step(n) for n in (1, 5000, 8192, 8193, 33000)]
    [1024, 5120, 8192, 10240, 40960]
    """
    step = max(_TOKENS, _rung(tokens, 1) // 8)
    return -(-tokens // step) * step


def _dense(x: Tensor) -> Tensor:
    """As kernels read it: a head's numbers side by side, from an address they can load from."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0
    return x if x.stride(-1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


_last: tuple[Any, tuple[int, int], Ragged] | None = None
"""The row cut last: all layers of a model, forward and backward, have the same.

A buffer may be filled again without a sign (by a broadcast, through `.data`, by a replay), so this
ends with its batch: when a model's first layer attends, or when a backward has been."""
_spent = False
"""Whether a backward has been."""


def forget() -> None:
    """Work out anew how the next row is cut."""
    global _last
    _last = None


def _begin() -> None:
    global _spent
    if _spent and torch._C._current_graph_task_id() == -1:  # layers made again belong to the batch
        _spent = False
        forget()


def _end() -> None:
    global _spent
    _spent = True


def _ragged(cu_seqlens: Tensor) -> Ragged:
    global _last
    sequences = _rung(len(cu_seqlens) - 1, _FEWEST)
    if cu_seqlens.is_inference() or (
        cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return Ragged(cu_seqlens, sequences)  # a replay would not know of a change
    kept, state = _last, (cu_seqlens._version, _stream(cu_seqlens))
    if kept is None or kept[0]() is not cu_seqlens or kept[1] != state:
        kept = weakref.ref(cu_seqlens), state, Ragged(cu_seqlens, sequences)
        _last = kept
    return kept[2]


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


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
