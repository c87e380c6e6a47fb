"""`attend_image_spans`: tokens of one image see each other in both directions, as in Gemma 3.

    document     a a I I I b b I I c        causal attention has computed every token
    its spans    a a[I I I]                 each span, after what precedes it in its document, is
                 a a I I I b b[I I]         a sequence of its own that is not causal; the outputs
                                            in brackets replace the causal ones

What precedes a span is computed again for each span, in windowed layers no further back than their
window. Nothing of it is kept for the backward pass, which computes it once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backends.call_spec import ScoreParams, call_spec
from .backends.selection import BACKEND_MODULES, select_backend
from .varlen import Varlen, batch_cache


def attend_image_spans(
    causal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen,
    joined: Tensor,
    params: dict[str, Any],
) -> Tensor:
    """Return causal outputs [T, H, Dv] with those of tokens in image spans replaced.

    joined: bool, T elements in any shape: whether a token sees the next one. Tokens of two
        documents are never of one span.
    params: those of `attend`.
    """
    if varlen.pages is not None:
        return causal  # the engine refuses images
    if not torch.compiler.is_compiling() and not _joins_any(joined):
        return causal
    for reason, found in (
        ("in rows that are spread over ranks", varlen.group),
        ("with soft-capped scores", params["softcap"]),
        ("with attention sinks", params["sinks"]),
    ):
        if found is not None:
            raise ValueError(f"images whose tokens see each other are not supported {reason}")
    scale, window = params["scale"], params["window"]
    return image_spans(causal, q, k, v, varlen.cu_seqlens, joined, scale, window)


def find_spans(cu_seqlens: Tensor, joined: Tensor, window: int | None) -> list[tuple[int, ...]]:
    """Return, for each span, the first key that it sees, its first token and its end.

    >>> joined = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0, 0]).bool()
    >>> find_spans(torch.tensor([0, 10]), joined, None)
    [(0, 2, 5), (0, 7, 9)]
    >>> find_spans(torch.tensor([0, 4, 10]), joined, 2)
    [(1, 2, 4), (6, 7, 9)]
    """
    bounds, flags = cu_seqlens.cpu().numpy(), joined.flatten().cpu().numpy().astype(np.int8)
    flags[bounds[bounds > 0] - 1] = 0  # the last token of a document joins no other
    edges = np.diff(flags, prepend=0, append=0)
    firsts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) + 1
    documents = bounds[np.searchsorted(bounds, firsts, side="right") - 1]
    if window is not None:
        longest = int((ends - firsts).max(initial=0))
        if longest > window:
            raise ValueError(
                f"an image of {longest} tokens is longer than the sliding window of {window}, "
                "within which its tokens see each other: use smaller images"
            )
        documents = np.maximum(documents, firsts - window + 1)
    return list(zip(documents.tolist(), firsts.tolist(), ends.tolist(), strict=True))


def _joins_any(joined: Tensor) -> bool:
    """Return whether a batch has image spans, read from the device once for all layers."""
    derived = batch_cache(joined)
    if "any" not in derived:
        derived["any"] = bool(joined.any())
    return derived["any"]


class _Rows:
    """The sequences of all spans: where their tokens are, and which outputs are used."""

    def __init__(self, spans: list[tuple[int, ...]], device: torch.device):
        parts = [np.arange(begin, end) for begin, _, end in spans]
        lengths = [len(part) for part in parts]
        used = [np.arange(begin, end) >= first for begin, first, end in spans]
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        self.varlen = Varlen(cu_seqlens, max(lengths))
        self.tokens = torch.from_numpy(np.concatenate(parts)).to(device)
        """int64 [R]: the token of each row."""
        self.used = torch.from_numpy(np.flatnonzero(np.concatenate(used))).to(device)
        """int64 [S]: the rows that are in spans."""


def _rows(cu_seqlens: Tensor, joined: Tensor, window: int | None) -> _Rows | None:
    """Return the rows of a batch, found once for all layers of a window; None without spans."""
    derived, key = batch_cache(joined), f"image spans in a window of {window}"
    if key not in derived:
        spans = find_spans(cu_seqlens, joined, window)
        derived[key] = _Rows(spans, joined.device) if spans else None
    return derived[key]


def _backend(q: Tensor, k: Tensor, v: Tensor, rows: _Rows, params: ScoreParams) -> Any:
    """Return the backend of both passes: the backward computes the forward once more."""
    return BACKEND_MODULES[select_backend(call_spec(q, k, v, params, rows.varlen, grad=True))]


@torch.library.custom_op("nopad::image_spans", mutates_args=())
def image_spans(
    causal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    joined: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    out, rows = causal.clone(), _rows(cu_seqlens, joined, window)
    if rows is not None:
        q, k, v = (x[rows.tokens] for x in (q, k, v))
        params = ScoreParams(scale, window, causal=False)
        found, _ = _backend(q, k, v, rows, params).forward(q, k, v, rows.varlen, params)
        out[rows.tokens[rows.used]] = found[rows.used]
    return out


@image_spans.register_fake
def _(causal: Tensor, *_: Any) -> Tensor:
    return causal.new_empty(causal.shape)


@torch.library.custom_op("nopad::image_spans_backward", mutates_args=())
def image_spans_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    joined: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _rows(cu_seqlens, joined, window)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    causal = grad.clone()
    if rows is not None:
        q, k, v = (x[rows.tokens] for x in (q, k, v))
        params = ScoreParams(scale, window, causal=False)
        backend = _backend(q, k, v, rows, params)
        out, lse = backend.forward(q, k, v, rows.varlen, params)
        inside = torch.zeros_like(out)
        inside[rows.used] = grad[rows.tokens[rows.used]]
        causal[rows.tokens[rows.used]] = 0
        parts = backend.backward(inside, q, k, v, out, lse, rows.varlen, params)
        for gradient, part in zip((dq, dk, dv), parts, strict=False):
            # In a fixed order, unlike index_add_: a resumed run has the same gradients.
            gradient.index_put_((rows.tokens,), part, accumulate=True)
    return causal, dq, dk, dv


@image_spans_backward.register_fake
def _(grad, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (grad, q, k, v))


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors)
    ctx.params = scale, window


def _backward(ctx: Any, grad: Tensor) -> tuple:
    found = image_spans_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.params)
    return *found, None, None, None, None


image_spans.register_autograd(_backward, setup_context=_save)
