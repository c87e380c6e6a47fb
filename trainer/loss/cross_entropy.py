"""Cross-entropy straight from hidden states: the logits of all tokens never exist at once.

    hidden [T, H] ─ rows that count ─┬─ chunk ─▶ logits [C, V] ─▶ losses [C]
                                     │              └─ overwritten by their own gradient
                                     │                     └─▶ d hidden, d weight
                                     └─ next chunk reuses the memory

The gradient is computed together with the loss, chunk by chunk, because it needs the very logits
that are thrown away. Prompts, and whatever else carries no label, cost nothing here. The op is
opaque to torch.compile, so that it breaks no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX

CHUNK_BYTES = 1 << 31
"""How large a chunk of logits may be on an accelerator."""
CHUNK_BYTES_CPU = 1 << 24
"""On a CPU a chunk should stay near the caches."""
NEARLY_ALL = 31 / 32
"""The share of rows that count from which on picking them out does not pay."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    divisor: Tensor | float = 1.0,
    counted: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of token losses over `divisor`, and each loss (detached, fp32).

    hidden [T, H], weight [V, H], targets [T] with IGNORE_INDEX where nothing counts. `z_loss` adds
    that multiple of the squared log-normalizer to every counted token. `counted` is the number of
    targets that count; left out, the device is asked, and waited for.

    >>> hidden, weight = torch.eye(2), torch.zeros(4, 2)
    >>> total, losses = linear_cross_entropy(hidden, weight, torch.tensor([3, IGNORE_INDEX]))
    >>> round(total.item(), 4), [round(x, 4) for x in losses.tolist()]
    (1.3863, [1.3863, 0.0])
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if token_weights is None:
        token_weights = torch.ones_like(targets, dtype=torch.float32)
    # Divided before, the gradients come out as they will be used; fp16 could not hold them.
    after = hidden.dtype == torch.float16
    if not after:
        token_weights = token_weights / divisor
    wants = torch.is_grad_enabled()
    total, losses, *_ = _losses(
        hidden,
        weight,
        bias,
        targets,
        token_weights,
        label_smoothing,
        z_loss,
        wants and hidden.requires_grad,
        wants and weight.requires_grad,
        wants and bias is not None and bias.requires_grad,
        -1 if counted is None else counted,
    )
    return total / divisor if after else total, losses.detach()


@torch.library.custom_op("nopad::linear_cross_entropy", mutates_args=())
def _losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor,
    smoothing: float,
    z_loss: float,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    counted: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return total, token losses, and the gradients of hidden, weight and bias (or empty)."""
    rows = _rows_that_count(targets, counted)
    options = smoothing, z_loss, wants_hidden, wants_weight, wants_bias
    room = hidden.new_empty(_most_rows(hidden, weight), len(weight))
    picked, labels, weights = (
        x if rows is None else x[rows] for x in (hidden, targets, token_weights)
    )
    losses, d_hidden, d_weight, d_bias = _by_chunks(
        room, picked, weight, bias, labels, weights, *options
    )
    total = (losses * weights).sum()
    if rows is not None:
        losses = _spread(losses, rows, len(hidden))
        d_hidden = _spread(d_hidden, rows, len(hidden)) if wants_hidden else d_hidden
    return total, losses, d_hidden, d_weight, d_bias


def _by_chunks(
    room: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor,
    smoothing: float,
    z_loss: float,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token losses and the gradients; `room` holds the logits of a chunk."""
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden if wants_hidden else hidden[:0])
    d_weight = _sum_like(weight if wants_weight else weight[:0])
    d_bias = _sum_like(weight[: len(weight) * wants_bias, 0]).zero_()
    kernel = _kernel(hidden.device.type)
    for rows in _chunks(len(hidden), len(room)):
        logits = room[: rows.stop - rows.start]
        if bias is None:
            torch.mm(hidden[rows], weight.T, out=logits)
        else:
            torch.addmm(bias, hidden[rows], weight.T, out=logits)
        losses[rows] = kernel(logits, targets[rows], token_weights[rows], smoothing, z_loss)
        if wants_hidden:
            torch.mm(logits, weight, out=d_hidden[rows])
        if wants_weight:
            _add_product(d_weight, logits.T, hidden[rows], first=rows.start == 0)
        if wants_bias:
            d_bias.add_(logits.sum(0, dtype=d_bias.dtype))
    return losses, d_hidden, d_weight if len(hidden) else d_weight.zero_(), d_bias


@_losses.register_fake
def _(hidden, weight, bias, targets, token_weights, smoothing, z_loss, *settings):
    wants_hidden, wants_weight, wants_bias, _ = settings
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape[:1], dtype=torch.float32),
        torch.empty_like(hidden if wants_hidden else hidden[:0]),
        _sum_like(weight if wants_weight else weight[:0]),
        _sum_like(weight[:, 0] if wants_bias else weight[:0, 0]),
    )


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.wants, ctx.dtype = inputs[7:10], inputs[1].dtype


def _backward(ctx, d_total, *_):
    gradients = (
        _scaled(gradient, d_total, ctx.dtype) if wanted else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.wants, strict=True)
    )
    return *gradients, *[None] * 8


_losses.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("nopad::scaled", mutates_args=())
def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32 and round once: `by` is no power of two and would lose bits in bf16."""
    if gradient.is_cuda:
        from ...kernels import scale_tensor

        return scale_tensor(gradient, by, dtype)
    return (gradient * by.to(torch.promote_types(gradient.dtype, by.dtype))).to(dtype)


@_scaled.register_fake
def _(gradient, by, dtype):
    return torch.empty_like(gradient, dtype=dtype)


def _sum_like(like: Tensor) -> Tensor:
    """Where gradients of chunks are summed: at least fp32, rounded at the very end."""
    return torch.empty_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b: on a GPU inside the product, which a pass of its own would slow by a third."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


def _rows_that_count(targets: Tensor, counted: int) -> Tensor | None:
    """Where the labels are; None where nearly everywhere, or where a CUDA graph is captured."""
    if counted < 0:
        if targets.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # cannot wait for a number
        counted = int((targets != IGNORE_INDEX).sum())
    if counted >= NEARLY_ALL * len(targets):
        return None
    # Unlike `nonzero`, sorting does not wait for the device.
    return torch.argsort((targets == IGNORE_INDEX).byte(), stable=True)[:counted]


def _spread(picked: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put picked rows back to their places, among zeros.

    >>> _spread(torch.tensor([5.0, 6.0]), torch.tensor([0, 2]), 4).tolist()
    [5.0, 0.0, 6.0, 0.0]
    """
    return picked.new_zeros(count, *picked.shape[1:]).index_copy_(0, rows, picked)


def _most_rows(hidden: Tensor, weight: Tensor) -> int:
    """How many tokens a chunk may hold; the same for all batches of one length."""
    room = CHUNK_BYTES_CPU if hidden.device.type == "cpu" else CHUNK_BYTES
    return min(len(hidden), max(1, room // (len(weight) * hidden.element_size())))


def _chunks(count: int, most: int) -> list[slice]:
    """Cut rows into equal chunks, none over `most`.

    >>> [(rows.start, rows.stop) for rows in _chunks(10, 4)]
    [(0, 4), (4, 8), (8, 10)]
    """
    step = -(-count // -(-count // most)) if count else 1
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _losses_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses of a chunk, and overwrite its logits by the gradient of their sum."""
    counted = targets != IGNORE_INDEX
    x = logits.float()
    normalizer = torch.logsumexp(x, dim=-1)
    picked = x.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]
    losses = normalizer - (1 - smoothing) * picked - smoothing * x.mean(-1)
    losses = losses + z_loss * normalizer.square()
    share = torch.exp(x - normalizer[:, None]) * (1 + 2 * z_loss * normalizer)[:, None]
    is_target = torch.arange(x.shape[1], device=x.device)[None] == targets[:, None]
    gradient = share - smoothing / x.shape[1] - (1 - smoothing) * is_target
    logits.copy_(gradient * (weights * counted)[:, None])
    return torch.where(counted, losses, 0.0)


@cache
def _kernel(device: str) -> Callable[..., Tensor]:
    """On a GPU, a row's arithmetic is one kernel of our own."""
    if device != "cuda":
        return _losses_and_gradient
    from ...kernels import losses_and_gradient

    return partial(losses_and_gradient, ignore_index=IGNORE_INDEX)
