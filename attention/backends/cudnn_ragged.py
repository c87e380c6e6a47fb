"""cuDNN's ragged attention through nvidia-cudnn-frontend: packed training rows on Hopper.

On an H200 its kernels take about 0.7 of flash-attn 2's time, forward and backward together. Each
call costs more on the host, so other backends are better for short rows (`selection.preference`).

cuDNN plans a graph for one number of sequences and one maximum length, which takes about a second.
Rows differ in both, so both are rounded up to a power of two and empty sequences are appended:
few plans serve all rows. The backward's number of tokens is rounded up less. Offsets of sequences
are computed once per batch and cached with its `cu_seqlens`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..varlen import Varlen, batch_cache, in_backward
from . import cudnn_graph
from .call_spec import CallSpec, ScoreParams
from .cudnn_graph import GraphShape, RaggedOffsets

_MIN_SEQUENCES, _MIN_LENGTH, _TOKEN_STEP = 16, 512, 1024


@cache
def _missing_library() -> str | None:
    """Return why the library cannot be used; None if it can."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception as error:
        return f"nvidia-cudnn-frontend is not installed ({type(error).__name__}: {error})"
    return None


def limit_reason(spec: CallSpec) -> str | None:
    if spec.device != "cuda":
        return "it needs CUDA"
    if torch.cuda.get_device_capability()[0] != 9:
        return "it was only tested on Hopper"
    if spec.sinks or spec.softcap or spec.window or not spec.causal:
        return "it is only used for plain causal scores"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} kernels"
    if max(spec.key_dim, spec.value_dim) > 128 or spec.key_dim % 8 or spec.value_dim % 8:
        dims = f"{spec.key_dim} and {spec.value_dim}"
        return f"head dims {dims} are over 128 or not multiples of 8"
    return _missing_library()


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    return _forward(q, k, v, varlen.cu_seqlens, varlen.max_length, score_params.scale)[0]


def forward(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> tuple[Tensor, Tensor]:
    """Attend like `packed`, without autograd; return the log-sum-exp as well."""
    return _forward(q, k, v, varlen.cu_seqlens, varlen.max_length, score_params.scale)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    varlen: Varlen,
    score_params: ScoreParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    lse = lse.view(*q.shape[:2], 1)
    bounds = (varlen.cu_seqlens, varlen.max_length)
    return _gradients(grad, q, k, v, out, lse, *bounds, score_params.scale)


@torch.library.custom_op("nopad::cudnn_packed", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [T, H, 1] that the backward needs."""
    q, k, v = map(_aligned, (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
    graph = cudnn_graph.forward_graph(_shape(q, k, v, len(cu_seqlens) - 1, max_length, scale))
    offsets = _offsets(cu_seqlens)
    if offsets.backward_done and not in_backward():
        # A new batch in the buffer of the one before, which may be refilled without a new version.
        offsets = _offsets(cu_seqlens, refresh=True)
    graph.run({"q": q, "k": k, "v": v, "out": out, "lse": lse}, offsets)
    return out, lse


@_forward.register_fake
def _(q, k, v, cu_seqlens, max_length, scale):
    tokens, heads, _ = q.shape
    lse = q.new_empty(tokens, heads, 1, dtype=torch.float32)
    return q.new_empty(tokens, heads, v.shape[-1]), lse


@torch.library.custom_op("nopad::cudnn_packed_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad = map(_aligned, (q, k, v, grad.contiguous()))
    shape = replace(
        _shape(q, k, v, len(cu_seqlens) - 1, max_length, scale),
        tokens=_round_up_tokens(len(q)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad": grad}
    outputs = {"dq": dq, "dk": dk, "dv": dv}
    offsets = _offsets(cu_seqlens)
    cudnn_graph.backward_graph(shape).run(inputs | outputs, offsets)
    offsets.backward_done = True
    return dq, dk, dv


@_gradients.register_fake
def _(grad, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _offsets(cu_seqlens: Tensor, refresh: bool = False) -> RaggedOffsets:
    """Return the offsets of a batch: all layers, forward and backward, use the same."""
    derived, key = batch_cache(cu_seqlens), f"cudnn offsets, stream {_stream(cu_seqlens)}"
    if refresh or key not in derived:
        sequences = _round_up_pow2(len(cu_seqlens) - 1, _MIN_SEQUENCES)
        derived[key] = RaggedOffsets(cu_seqlens, sequences)
    return derived[key]


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def _shape(
    q: Tensor, k: Tensor, v: Tensor, sequences: int, max_length: int, scale: float
) -> GraphShape:
    """Return the shape to plan for, rounded up so that few plans serve all rows."""
    return GraphShape(
        device=q.device,
        dtype=q.dtype,
        sequences=_round_up_pow2(sequences, _MIN_SEQUENCES),
        max_length=_round_up_pow2(max_length, _MIN_LENGTH),
        q=_layout(q),
        k=_layout(k),
        v=_layout(v),
        scale=scale,
    )


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    return x.shape[1], x.shape[2], x.stride(0), x.stride(1)


def _round_up_pow2(count: int, minimum: int) -> int:
    """Round up to a power of two.

    >>> [_round_up_pow2(n, 16) for n in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(minimum, 1 << (count - 1).bit_length())


def _round_up_tokens(tokens: int) -> int:
    """Round up to an eighth of the next power of two: few values, and little padding.

    >>> [_round_up_tokens(n) for n in (1, 5000, 8192, 8193, 33000)]
    [1024, 5120, 8192, 10240, 40960]
    """
    step = max(_TOKEN_STEP, _round_up_pow2(tokens, 1) // 8)
    return -(-tokens // step) * step


def _aligned(x: Tensor) -> Tensor:
    """Return x in the layout kernels need: contiguous head dim, 16-byte aligned rows."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0
    return x if x.stride(-1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    *tensors, max_length, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.params = max_length, scale


def _backward(ctx, grad, _):
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    grads = _gradients(grad, q, k, v, out, lse, cu_seqlens, *ctx.params)
    return *grads, None, None, None


_forward.register_autograd(_backward, setup_context=_save)
