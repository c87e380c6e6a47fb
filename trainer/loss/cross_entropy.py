"""Linear cross-entropy: the loss from hidden states, chunk by chunk, without all logits in memory.

    hidden [T, H] ─ rows with a label ─┬─ chunk ─▶ logits [C, V] ─▶ losses [C]
                                       │              └─ overwritten by their gradient
                                       │                     └─▶ d hidden, d weight
                                       └─ next chunk reuses the memory

The gradient is computed together with the loss, chunk by chunk, because it needs the logits, which
are not kept. Tokens without a label, such as prompts, cost nothing here. The op is opaque to
torch.compile, so that it does not break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...packing import IGNORE_INDEX

CHUNK_BYTES = 1 << 31
"""Largest chunk of logits on an accelerator."""
CHUNK_BYTES_CPU = 1 << 24
"""Largest chunk of logits on a CPU, where it should fit the caches."""
SELECT_BELOW = 31 / 32
"""Rows with a label are selected if they are fewer than this fraction; above it, all are used."""


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
    num_labels: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of token losses over `divisor`, and each loss (detached).

    Losses are fp32, or fp64 if hidden is. A target outside the vocabulary gives NaN: reading it
    back to raise would stall the device.

    Args:
        hidden: [T, H], the inputs of the LM head.
        weight: [V, H], the weight of the LM head.
        targets: [T], shifted labels, IGNORE_INDEX for tokens without one.
        bias: [V], the bias of the LM head.
        token_weights: [T], a weight for each token's loss; default: 1.
        label_smoothing: fraction of each label that is spread over the vocabulary.
        z_loss: weight of the squared log-normalizer, added for every label.
        divisor: divides the sum.
        num_labels: number of labels in `targets`; without it they are counted, with a host sync.

    >>> hidden, weight = torch.eye(2), torch.zeros(4, 2)
    >>> total, losses = linear_cross_entropy(hidden, weight, torch.tensor([3, IGNORE_INDEX]))
    >>> round(total.item(), 4), [round(x, 4) for x in losses.tolist()]
    (1.3863, [1.3863, 0.0])
    """
    dtype, product_dtype = hidden.dtype, weight.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = product_dtype = torch.get_autocast_dtype(hidden.device.type)
        bias = None if bias is None else bias.to(dtype)
    if token_weights is None:
        token_weights = torch.ones_like(targets, dtype=_wide(dtype))
    # Dividing first gives the gradients their final scale, which underflows in fp16.
    divide_after = dtype == torch.float16
    if not divide_after:
        token_weights = token_weights / divisor
    needs_grad = torch.is_grad_enabled()
    total, losses, *_ = _losses(
        hidden.to(dtype), weight, _aligned(weight.detach(), product_dtype), bias,
        targets, token_weights, label_smoothing, z_loss,
        needs_grad and hidden.requires_grad, needs_grad and weight.requires_grad,
        needs_grad and bias is not None and bias.requires_grad,
        -1 if num_labels is None else num_labels,
    )  # fmt: skip
    return total / divisor if divide_after else total, losses.detach()


@torch.library.custom_op("nopad::linear_cross_entropy", mutates_args=())
def _losses(
    hidden: Tensor, master: Tensor, weight: Tensor, bias: Tensor | None,
    targets: Tensor, token_weights: Tensor, smoothing: float, z_loss: float,
    wants_hidden: bool, wants_weight: bool, wants_bias: bool, num_labels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return total, token losses, and the gradients of hidden, master and bias (or empty).

    master: the weight as it is stored; `weight` is its copy for the products, from `_aligned`.
    """
    rows = _label_rows(targets, num_labels)
    vocab_size = len(master)
    logits_buffer = hidden.new_empty(_max_chunk_rows(hidden, weight), len(weight))
    shift = None if bias is None else pad(bias, (0, len(weight) - vocab_size))
    inputs, labels, weights = (
        x if rows is None else x[rows] for x in (hidden, targets, token_weights)
    )
    losses = torch.empty(len(inputs), dtype=_wide(hidden.dtype), device=hidden.device)
    d_hidden = torch.empty_like(inputs if wants_hidden else inputs[:0])
    d_weight = _wide_like(weight if wants_weight else weight[:0])
    d_bias = _wide_like(weight[: len(weight) * wants_bias, 0]).zero_()
    kernel = _kernel(hidden.device.type)
    for chunk in _chunks(len(inputs), len(logits_buffer)):
        logits = logits_buffer[: chunk.stop - chunk.start]
        if shift is None:
            torch.mm(inputs[chunk], weight.T, out=logits)
        else:
            torch.addmm(shift, inputs[chunk], weight.T, out=logits)
        # Overwrites the logits with their gradient.
        losses[chunk] = kernel(logits, vocab_size, labels[chunk], weights[chunk], smoothing, z_loss)
        if wants_hidden:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if wants_weight:
            _add_matmul(d_weight, logits.T, inputs[chunk], first=chunk.start == 0)
        if wants_bias:
            d_bias.add_(logits.sum(0, dtype=d_bias.dtype))
    if not len(inputs):
        d_weight.zero_()
    total = (losses * weights).sum()
    if rows is not None:
        losses = _scatter_rows(losses, rows, len(hidden))
        d_hidden = _scatter_rows(d_hidden, rows, len(hidden)) if wants_hidden else d_hidden
    return total, losses, d_hidden, d_weight[:vocab_size], d_bias[:vocab_size]


@_losses.register_fake
def _(hidden, master, weight, bias, targets, token_weights, smoothing, z_loss, *options):
    wants_hidden, wants_weight, wants_bias, _ = options
    wide = _wide(hidden.dtype)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape[:1], dtype=wide),
        torch.empty_like(hidden if wants_hidden else hidden[:0]),
        weight.new_empty(master.shape if wants_weight else (0, *master.shape[1:]), dtype=wide),
        weight.new_empty(len(master) * wants_bias, dtype=wide),
    )


def _setup_context(ctx, inputs, output) -> None:
    hidden, master, _, bias = inputs[:4]
    ctx.save_for_backward(*output[2:])
    ctx.wants = inputs[8:11]
    ctx.dtypes = hidden.dtype, master.dtype, hidden.dtype if bias is None else bias.dtype


def _backward(ctx, d_total, *_):
    d_hidden, d_master, d_bias = (
        _scaled(gradient, d_total, dtype) if wanted else None
        for gradient, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wants, strict=True)
    )
    return d_hidden, d_master, None, d_bias, *[None] * 8


_losses.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("nopad::scaled", mutates_args=())
def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32 and round once: in bf16 the product would lose bits."""
    if gradient.is_cuda:
        from ...kernels import scale_tensor

        return scale_tensor(gradient, by, dtype)
    return (gradient * by.to(torch.promote_types(gradient.dtype, by.dtype))).to(dtype)


@_scaled.register_fake
def _(gradient, by, dtype):
    return torch.empty_like(gradient, dtype=dtype)


def _wide_like(tensor: Tensor) -> Tensor:
    """Allocate a sum over the gradients of chunks, rounded at the end."""
    return torch.empty_like(tensor, dtype=_wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and losses: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b; on a GPU in the matmul's epilogue, since a separate add takes a third longer."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


def _label_rows(targets: Tensor, num_labels: int) -> Tensor | None:
    """Return the rows with a label; None for all rows: nearly all have one, or inside a capture."""
    if num_labels < 0:
        if targets.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a CUDA graph cannot read a number back
        num_labels = int((targets != IGNORE_INDEX).sum())
    if num_labels >= SELECT_BELOW * len(targets):
        return None
    # Unlike `nonzero`, sorting needs no host sync.
    return torch.argsort((targets == IGNORE_INDEX).byte(), stable=True)[:num_labels]


def _scatter_rows(selected: Tensor, rows: Tensor, count: int) -> Tensor:
    """Copy selected rows back to their positions, with zeros elsewhere.

    >>> _scatter_rows(torch.tensor([5.0, 6.0]), torch.tensor([0, 2]), 4).tolist()
    [5.0, 0.0, 6.0, 0.0]
    """
    return selected.new_zeros(count, *selected.shape[1:]).index_copy_(0, rows, selected)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a head's weight in a dtype, with rows of zeros if its vocabulary is odd on a GPU.

    A GPU multiplies rows of 49,159 logits, as Granite has, six times as slowly as of 49,216.
    """
    if not len(weight) % 8 or weight.device.type == "cpu":
        return weight.to(dtype)
    aligned = weight.new_zeros(-(-len(weight) // 64) * 64, weight.shape[1], dtype=dtype)
    aligned[: len(weight)] = weight
    return aligned


def _max_chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Return the tokens a chunk may hold; the same for all batches of one length."""
    max_bytes = CHUNK_BYTES_CPU if hidden.device.type == "cpu" else CHUNK_BYTES
    return min(len(hidden), max(1, max_bytes // (len(weight) * hidden.element_size())))


def _chunks(count: int, max_rows: int) -> list[slice]:
    """Cut rows into equal chunks of at most `max_rows`.

    >>> [(rows.start, rows.stop) for rows in _chunks(10, 4)]
    [(0, 4), (4, 8), (8, 10)]
    """
    step = -(-count // -(-count // max_rows)) if count else 1
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _losses_and_gradient(
    padded: Tensor, vocab_size: int, targets: Tensor, weights: Tensor, smoothing: float,
    z_loss: float,
) -> Tensor:  # fmt: skip
    """Return the losses of a chunk, and overwrite its logits with the gradient of their sum."""
    logits = padded[:, :vocab_size]
    has_label = targets != IGNORE_INDEX
    in_vocab = (targets >= 0) & (targets < logits.shape[1])
    weights = torch.where(in_vocab | ~has_label, weights, torch.nan)
    x = logits.to(_wide(logits.dtype))
    lse = torch.logsumexp(x, dim=-1)
    target_logits = x.gather(1, torch.where(in_vocab, targets, 0)[:, None])[:, 0]
    target_logits = torch.where(in_vocab, target_logits, torch.nan)
    losses = lse + z_loss * lse**2 - (1 - smoothing) * target_logits - smoothing * x.mean(-1)
    probabilities = torch.exp(x - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
    is_target = torch.arange(x.shape[1], device=x.device)[None] == targets[:, None]
    gradient = probabilities - smoothing / x.shape[1] - (1 - smoothing) * is_target
    logits.copy_(gradient * (weights * has_label)[:, None])
    return torch.where(has_label, losses, 0.0)


def _kernel(device: str) -> Callable[..., Tensor]:
    """Return the function that computes a chunk: one fused kernel on a GPU."""
    if device != "cuda":
        return _losses_and_gradient
    from ...kernels import losses_and_gradient

    return partial(losses_and_gradient, ignore_index=IGNORE_INDEX)
