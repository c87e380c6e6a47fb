"""`with batch_invariant():` results do not depend on which other tokens share a step.

Matrix products of different shapes add in different orders, so a token's logits differ in the last
bits with the batch it is in, and from those of the training forward. In this mode every product has
one shape (one row on a CPU, a block of rows on a GPU), and attention runs over keys padded to one
length: always the same sums in the same order. On a GPU, where the split of a reduction depends on
the number of rows, means, log-sum-exps and attention run in such blocks too. On a CPU activations
are padded, since the last few elements of a tensor are computed by another routine. Fused kernels
are off, and `sdpa`, which cannot be captured in CUDA graphs, is the attention backend.

    with batch_invariant(max_length=512):
        compare_logprobs(model, Engine(model), prompts)    # 0 on a CPU in float32

Use it to distinguish rounding from bugs: it takes about twice the time for a tiny model, far more
for a large one. It applies to the calling thread and to engines created inside. Models that compute
products in another way are refused, including those whose attention has a softcap or sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..attention import causal_mask
from ..attention.backends import force_backend, without_prefix_sharing, without_trials
from .fused.fused_ops import without_fused_ops
from .settings import check_positive

_MIN_ROWS = 2
"""Rows of a batched product on a CPU: a single row is computed by another routine."""
_BLOCK = 64
"""Rows of every product on a GPU."""
_VECTOR = 64
"""A multiple of the elements that a CPU computes at once."""
_ONE_THREAD = 32768
"""Elements up to which an elementwise function on a CPU uses one thread."""
_ELEMENTWISE = {
    F.silu, F.gelu, F.sigmoid, F.tanh, torch.sigmoid, torch.tanh, torch.exp, torch.cos, torch.sin,
    Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.cos, Tensor.sin,
}  # fmt: skip
"""Functions whose results on a CPU may differ in the last bit with an element's place."""
GROUPED_PRODUCTS = {getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}
UNSUPPORTED_PRODUCTS = {
    torch.matmul, torch.bmm, torch.mm, torch.baddbmm, Tensor.matmul, Tensor.bmm, Tensor.mm,
    Tensor.__matmul__,
}  # fmt: skip
"""Products whose order of summation depends on their shapes, unless they sum one element."""


@contextmanager
def batch_invariant(max_length: int) -> Iterator[None]:
    """Compute products in one shape, and attention over `max_length` keys.

    Args:
        max_length: the longest sequence, prompt and completion, that may run inside.
    """
    check_positive("max_length", max_length)
    # Without trials: the sequences of a trial may be longer than `max_length`.
    with (
        force_backend("sdpa"),
        without_trials(),
        without_prefix_sharing(),
        without_fused_ops(),
        _FixedShapes(max_length),
    ):
        yield


def is_batch_invariant() -> bool:
    """Return whether this thread is inside `batch_invariant`."""
    return any(isinstance(mode, _FixedShapes) for mode in _get_current_function_mode_stack())


class _FixedShapes(TorchFunctionMode):
    """Replace the torch functions whose order of summation depends on the batch."""

    def __init__(self, max_length: int):
        super().__init__()
        self._max_length = max_length

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(self._max_length, *args, **kwargs)
        if func is torch.addmm:  # as the layers of GPT-2 call it
            bias, input, weight = args
            return _linear(input, weight.t(), bias)
        if func in GROUPED_PRODUCTS:
            return _grouped(*args, **kwargs)
        if func is F.conv1d:
            raise ValueError(
                "batch_invariant does not support this model: its layers keep a state, which runs "
                "in batches and chunks"
            )
        if func in UNSUPPORTED_PRODUCTS and args[-1].shape[-2] > 1:
            raise ValueError(
                f"batch_invariant does not support this model: it calls {func.__name__}, as "
                "attention with a softcap or sinks does"
            )
        if func is Tensor.mean or func is Tensor.logsumexp:
            return _rowwise(func, *args, **kwargs)
        if func in _ELEMENTWISE and len(args) == 1 and not args[0].is_cuda:
            return _elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = (*input.shape[:-1], len(weight))
    if input.is_cuda:
        out = _blockwise(lambda block: F.linear(block, weight), input)
    else:
        rows = input.reshape(-1, 1, input.shape[-1])
        batch = rows.expand(_MIN_ROWS, -1, -1) if len(rows) == 1 else rows
        out = torch.bmm(batch, weight.t().expand(len(batch), -1, -1))[: len(rows)]
    out = out.reshape(shape)
    return out if bias is None else out + bias


def _grouped(
    input: Tensor, weight: Tensor, *, offs: Tensor, bias: None = None, out_dtype: None = None
) -> Tensor:
    """Multiply the rows of each expert, which end at `offs`; later rows have none."""
    assert bias is None and out_dtype is None, "Transformers passes neither"
    ends = offs.tolist()
    starts = [0, *ends]
    outputs = [
        _linear(input[start:end], matrix.t())
        for start, end, matrix in zip(starts, ends, weight, strict=False)
    ]
    return torch.cat([*outputs, input.new_zeros(len(input) - starts[-1], weight.shape[-1])])


def _rowwise(reduce: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce rows in blocks; reductions over anything but the last dimension are unchanged."""
    dim = args[0] if args else kwargs.get("dim")
    if not x.is_cuda or dim not in (-1, (-1,), [-1]):
        return reduce(x, *args, **kwargs)
    out = _blockwise(lambda block: reduce(block, *args, **kwargs), x)
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return out.reshape(*x.shape[:-1], *([1] if keepdim else []))


def _elementwise(function: Callable[..., Tensor], x: Tensor, **kwargs: Any) -> Tensor:
    """Apply a function to rows of whole vectors, few enough rows for one thread."""
    width = x.shape[-1] if x.ndim else 1
    rows = F.pad(x.reshape(-1, width), (0, -width % _VECTOR))
    num_rows = max(1, _ONE_THREAD // max(rows.shape[1], 1))
    blocks = [function(block, **kwargs) for block in rows.split(num_rows)]
    return torch.cat(blocks)[:, :width].reshape(x.shape)


def _blockwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to the rows of x, always to the same number of them."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
    return torch.cat([function(block) for block in padded.split(_BLOCK)])[: len(rows)]


def _attention(
    max_length: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend query by query, over keys padded to `max_length`; on a GPU in blocks of queries."""
    queries, keys = query.shape[-2], key.shape[-2]
    if keys > max_length:
        raise ValueError(f"a sequence has {keys} keys; raise max_length={max_length}")
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    bias = query.new_zeros(queries, keys) if attn_mask is None else attn_mask
    if is_causal:
        bias = bias.masked_fill(~causal_mask(queries, keys, None, query.device), float("-inf"))
    key, value = (F.pad(x, (0, 0, 0, max_length - keys)) for x in (key, value))
    bias = F.pad(bias, (0, max_length - keys), value=float("-inf"))
    softmax_scale: float = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cuda:
        return _attention_blockwise(query, key, value, bias, softmax_scale)
    scores = torch.stack([(query[..., i, None, :] * key).sum(-1) for i in range(queries)], -2)
    weights = (scores * softmax_scale + bias).softmax(-1)
    return torch.stack([(weights[..., i, :, None] * value).sum(-2) for i in range(queries)], -2)


def _attention_blockwise(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Attend [N, H, L, D] in blocks of queries, across sequences and heads."""
    n, heads, queries, _ = query.shape
    rows, keys, values = query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)
    biases = bias.expand(n, heads, queries, -1).flatten(0, 2)
    index = torch.arange(len(rows), device=query.device)
    outputs = []
    for block in F.pad(index, (0, -len(rows) % _BLOCK)).split(_BLOCK):
        k, v = (x[block // queries] for x in (keys, values))
        scores = (rows[block, None] * k).sum(-1) * scale + biases[block]
        outputs.append((scores.softmax(-1)[..., None] * v).sum(-2))
    return torch.cat(outputs)[: len(rows)].view(n, heads, queries, -1)
