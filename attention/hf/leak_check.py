"""Leak check: does a packed document see another? Gradients answer without a tolerance.

    random gradient of some documents' logits  ─▶  backward  ─▶  gradient of every embedded token

The gradient of a document's logits with respect to the embeddings of all other documents, and of
padding, is exactly zero unless a path leads from one to the other. Zeros stay zeros in every
precision, whichever experts the tokens are routed to, and in whichever order kernels add them.

Paths without a gradient are missed: top-k over all tokens, an expert capacity, dependence on the
row's length. They change values, so packed documents are also compared with documents run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import combinations
from math import comb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .mask_patch import document_mask

_FIRST, _LAST, _BETWEEN = 4, 8, 16
"""Tokens of a document whose logits are examined: at its start, at its end, and in between."""
_PROBED = 64
"""Documents, at most twice as many, whose logits are examined; the last three always are."""
_MOST_SETS = 5
"""Sets of documents whose logits are examined together: each takes a forward and a backward."""


def probe_positions(lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the positions in a row whose logits are examined, and how many each document has.

    The logits of a long row would take more memory than training does.

    >>> places, counts = probe_positions([3, 40])
    >>> counts, places[:8].tolist(), places[-3:].tolist()
    ([3, 26], [0, 1, 2, 3, 4, 5, 6, 7], [40, 41, 42])
    """
    places, counts, start = [], [], 0
    stride = len(lengths) // _PROBED | 1  # odd: every set of documents has some of them
    for number, length in enumerate(lengths):
        spread = range(_FIRST, length, max(1, length // _BETWEEN))
        own = {*range(min(_FIRST, length)), *spread, *range(max(0, length - _LAST), length)}
        if number % stride and number < len(lengths) - 3:
            own = set()
        places += sorted(start + place for place in own)
        counts.append(len(own))
        start += length
    return torch.tensor(places), counts


def probed_logits(
    model: Any, batch: dict[str, Any], lengths: Sequence[int], mask_documents: bool = False
) -> tuple[Tensor, list[int]]:
    """Return the logits [rows, vocabulary] to examine, and how many rows each document has.

    A head of documents, of a model with an attached loss, has one row for each.

    batch: of one row; its tokens after those of the documents are padding.
    lengths: of the documents.
    mask_documents: pass the boundaries to the stock masks.
    """
    ids, (places, counts) = batch["input_ids"], probe_positions(lengths)
    places = places.to(ids.device)
    keeps = "logits_to_keep" in signature(model.forward).parameters
    kept = {"logits_to_keep": places} if keeps else {}
    mask = document_mask(batch["cu_seq_lens_q"], ids.shape[1]) if mask_documents else nullcontext()
    # Compiled layers run as they train; a graph of the whole model would serve this check alone.
    is_graph = model._compiled_call_impl is not None
    eager = torch.compiler.set_stance("force_eager") if is_graph else nullcontext()
    with mask, eager:
        logits = model(**batch, **kept).logits
    if logits.ndim == 2 and len(logits) >= len(lengths):
        return logits[: len(lengths)], [1] * len(lengths)
    return logits[0] if keeps else logits[0][places], counts


def leaked_gradient(
    model: Any,
    batch: dict[str, Any],
    lengths: Sequence[int],
    mask_documents: bool = False,
    pixel_owners: Tensor | None = None,
) -> float:
    """Return the largest gradient that reaches other documents, or padding; 0.0 if they are apart.

    It is relative to the largest gradient inside the documents, and NaN if one is not a number.
    Weights get no gradient.

    batch: one row, without labels; its tokens after those of the documents are padding.
    lengths: of the documents.
    mask_documents: pass the boundaries to the stock masks.
    pixel_owners: the document of each image in `pixel_values`; images are examined like tokens.
    """
    row = batch["input_ids"].shape[-1]
    owners = torch.full((row,), len(lengths))
    owners[: sum(lengths)] = torch.repeat_interleave(torch.tensor(lengths))
    leaks, pixels = [], None
    if pixel_owners is not None:
        owners = torch.cat([owners, pixel_owners])
        pixels, used = as_leaf(batch["pixel_values"])
        batch = {**batch, "pixel_values": used}
    for side in map(torch.tensor, _document_sets(len(lengths))):
        # Once per set: compiled layers free what they saved after one backward.
        with (
            embeddings_replaced(model, as_leaf) as embedded,
            _no_reentrance(model),
            torch.enable_grad(),
        ):
            logits, counts = probed_logits(model, batch, lengths, mask_documents)
        probed = torch.repeat_interleave(torch.tensor(counts))
        by_token = token_gradients(logits, embedded, torch.isin(probed, side), pixels)
        inside = torch.isin(owners, side)
        leaks.append(by_token.masked_fill(inside, 0.0).max() / by_token[inside].max())
    return torch.stack(leaks).max().item()


def has_gradient_inside(
    model: Any, batch: dict[str, Any], lengths: Sequence[int], mask_documents: bool = False
) -> bool:
    """Return whether some gradient passes between tokens of a document: else no leak would show.

    The arguments are those of `leaked_gradient`.
    """
    with (
        embeddings_replaced(model, as_leaf) as embedded,
        _no_reentrance(model),
        torch.enable_grad(),
    ):
        logits, counts = probed_logits(model, batch, lengths, mask_documents)
    if not logits.requires_grad:
        return False
    rows = torch.tensor(counts)
    is_last = torch.zeros(len(logits), dtype=torch.bool)
    is_last[(rows.cumsum(0) - 1)[rows > 0]] = True
    by_token = token_gradients(logits, embedded, is_last)[: sum(lengths)]
    return any(len(own.nonzero()) > 1 for own in by_token.split(list(lengths)))


def _document_sets(count: int) -> list[list[int]]:
    """Return few sets of documents that separate any two of them, in both directions.

    Each document is in two of the sets (in one, if there are two or three), and no two documents in
    the same: of any two, each is in a set without the other. Beyond ten documents, two whose
    indices differ by a multiple of ten are not separated.

    >>> _document_sets(3)
    [[0], [1], [2]]
    >>> _document_sets(6)
    [[0, 1, 2], [0, 3, 4], [1, 3, 5], [2, 4, 5]]
    """
    sets = 1
    while sets < _MOST_SETS and comb(sets, max(1, sets // 2)) < count:
        sets += 1
    memberships = list(combinations(range(sets), max(1, sets // 2)))
    of = [memberships[index % len(memberships)] for index in range(count)]
    return [[index for index in range(count) if number in of[index]] for number in range(sets)]


def token_gradients(
    logits: Tensor, embedded: list[Tensor], probed: Tensor, pixels: Tensor | None = None
) -> Tensor:
    """Return the largest gradient of each embedded token, from random ones of the probed logits.

    Those of images, or of their patches, follow.
    """
    device = logits.device
    generator = torch.Generator(device).manual_seed(0)
    # Random: a gradient of ones is hidden by a norm. Scaled, so that fp16 does not overflow.
    gradient = torch.randn(logits.shape, generator=generator, device=device)
    gradient *= probed.to(device)[:, None] / logits.shape[-1] ** 0.5
    leaves = embedded if pixels is None else [*embedded, pixels]
    found = torch.autograd.grad(logits, leaves, gradient.to(logits.dtype), allow_unused=True)
    pairs = zip(embedded, found, strict=False)
    of_tokens = [torch.zeros_like(x) if g is None else g for x, g in pairs]
    by_token = [g.float().abs().amax(-1).view(-1) for g in of_tokens]
    largest = torch.stack(by_token).amax(0)
    if pixels is not None:
        of_pixels = torch.zeros_like(pixels) if found[-1] is None else found[-1]
        rows = of_pixels.squeeze(0) if of_pixels.ndim == 5 else of_pixels
        largest = torch.cat([largest, rows.float().abs().flatten(1).amax(1)])
    return largest.cpu()


@contextmanager
def _no_reentrance(model: nn.Module) -> Iterator[None]:
    """Have layers checkpoint without reentrance inside, with the same values.

    `autograd.grad` refuses reentrant checkpoints, and a `backward` would reach the weights.
    """
    name = "_gradient_checkpointing_func"
    functions = [(m, vars(m)[name]) for m in model.modules() if name in vars(m)]
    try:
        for module, function in functions:
            setattr(module, name, partial(function, use_reentrant=False))
        yield
    finally:
        for module, function in functions:
            setattr(module, name, function)


def as_leaf(embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf that gets a gradient, and what the model continues with."""
    leaf = embedded.detach().requires_grad_()
    return leaf, leaf.clone()  # a model may scale its embeddings in place


@contextmanager
def embeddings_replaced(
    model: Any, replace: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Iterator[list[Tensor]]:
    """Replace the output of the token embedding inside; yield the list of kept tensors.

    replace: takes the output, and returns the tensor to keep and the one the model continues with.
    """
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        aside, replaced = replace(output)
        kept.append(aside)
        return replaced

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def zero_weights_filled(model: nn.Module) -> Iterator[None]:
    """Give weights that are zero small random values inside, and zeros again after.

    A projection, gate or adapter that starts at zero hides every path through it, and so does a
    convolution that starts as the identity: zeros among the entries of what is trained.
    """
    found = [(_local(p), p.requires_grad) for p in model.parameters() if p.is_floating_point()]
    places = [(values, _zero_entries(values, trained)) for values, trained in found]
    zeros = [(values, at, values[at].detach().clone()) for values, at in places if at is not None]
    try:
        with torch.no_grad():
            for index, (values, at, before) in enumerate(zeros):
                generator = torch.Generator(values.device).manual_seed(index)
                values[at] = torch.empty_like(before).normal_(0.0, 0.02, generator=generator)
        yield
    finally:
        with torch.no_grad():
            for values, at, before in zeros:
                values[at] = before


def _zero_entries(values: Tensor, is_trained: bool) -> Any:
    """Return the index of entries that are zero, if all are, or if they are trained; or None."""
    if not values.any():
        return ...
    places = torch.nonzero(values == 0, as_tuple=True) if is_trained else ()
    return places if places and len(places[0]) else None


def _local(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter that is spread over ranks."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
