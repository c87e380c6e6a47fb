"""The checks behind `nopad doctor`: a model run packed, one by one and over pages.

The same documents run packed, one by one, and over pages:

    leak     a gradient of a document's logits reaches another document (`leak_check.py`)
    wrong    packed logits, loss or gradients differ from those of the documents run one by one
    paged    the same tokens, fed in chunks through the cache, give other logits than the packed row

Also used by the model zoo test. Trainers check with `trainer/monitoring/packing_difference.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paging.allocator import PageAllocator
from ..paging.cache import PagedCache
from ..varlen import Pages, Varlen
from .leak_check import leaked_gradient
from .mask_patch import document_mask
from .model_support import layer_shapes, stateful_parts, step_context
from .sequence_limits import frozen_rotary, sequence_limit
from .state_pool import StatePool

LENGTHS = (9, 1, 14, 6, 11)


@dataclass(frozen=True, slots=True)
class PackedDifferences:
    """Largest differences between a pack and its documents run one by one."""

    leak: float
    """Largest gradient between documents, relative to those inside; exactly 0 if isolated."""
    logits: float
    loss: float
    gradients: float
    """Relative to the largest gradient."""

    def worst(self, other: PackedDifferences) -> PackedDifferences:
        """Return the larger of each difference; NaN is the largest."""
        return PackedDifferences(*map(nan_max, zip(astuple(self), astuple(other), strict=True)))

    def within(self, tolerance: float = 1e-3) -> bool:
        """Return whether nothing leaks and every difference is at most `tolerance`; NaN is not."""
        largest = nan_max([self.logits, self.loss, self.gradients])
        return self.leak == 0.0 and largest <= tolerance


def nan_max(differences: Iterable[float]) -> float:
    """Return the largest, or NaN if one is NaN: Python's `max` may lose it.

    >>> nan_max([0.5, float("nan"), 2.0])
    nan
    """
    return torch.tensor([0.0, *differences], dtype=torch.float64).max().item()


def random_documents(model: Any, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Return random documents [1, n] from the model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = min(_vocab_size(model), 30_000)
    device = next(model.parameters()).device
    return [torch.randint(3, vocab_size, (1, n), generator=generator).to(device) for n in lengths]


def _vocab_size(model: Any) -> int:
    """Return the number of tokens that a model both reads and predicts."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(e.weight.shape[0] for e in embeddings if e is not None)


def packed_batch(documents: Sequence[Tensor]) -> dict[str, Any]:
    """Return the batch that a collator makes of these documents, concatenated."""
    device = documents[0].device
    lengths = [d.shape[1] for d in documents]
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    return {
        "input_ids": torch.cat(list(documents), 1),
        "position_ids": positions,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }


def check_packed(
    model: Any,
    oracle: Any | None = None,
    *,
    repair: bool = False,
    lengths: Sequence[int] = LENGTHS,
) -> PackedDifferences:
    """Compare a pack with its documents one by one, run by the oracle or the model itself.

    oracle: a model with the same weights and trusted attention, such as `eager`.
    repair: run the pack inside `document_mask`.
    lengths: of the documents.
    """
    documents = random_documents(model, lengths)
    logits, loss, gradients = _packed(model, documents, repair)
    expected, expected_loss, expected_gradients = _one_by_one(oracle or model, documents)
    scale = max((g.abs().max().item() for g in expected_gradients), default=1.0) or 1.0
    pairs = zip(gradients, expected_gradients, strict=True)
    return PackedDifferences(
        leak=leaked_gradient(model, packed_batch(documents), lengths, repair),
        logits=_largest(logits - expected),
        loss=abs(loss - expected_loss),
        gradients=nan_max(_largest(a - b) for a, b in pairs) / scale,
    )


def check_default_cache(model: Any) -> float:
    """Return the leak of a pack whose batch does not set use_cache=False.

    Transformers then creates a cache, and with a cache its stock masks do not look for documents.
    """
    batch = packed_batch(random_documents(model))
    del batch["use_cache"]
    return leaked_gradient(model, batch, LENGTHS)


def check_paged(model: Any, page_size: int = 16) -> float:
    """Return the largest difference of logits between a packed row and the same tokens over pages.

    Documents are fed in uneven chunks, so that steps mix prefills, chunked prefills and decodes.
    """
    limit = sequence_limit(model.config.get_text_config())
    longest = 35 if limit is None else min(35, limit.length)
    documents = random_documents(model, lengths=(9, 1, longest, 6, min(18, longest)))
    with torch.no_grad():
        lengths = [d.shape[1] for d in documents]
        if stateful_parts(model):  # a packed row resets states only with an attached loss
            expected = [model(input_ids=each, use_cache=False).logits[0] for each in documents]
        else:
            expected = _forward(model, documents, repair=False)[0].split(lengths)
        differences = []
        for spans, logits in _paged_steps(model, documents, page_size):
            for index, (start, end) in enumerate(spans):
                chunk, logits = logits[: end - start], logits[end - start :]
                differences.append(_largest(chunk - expected[index][start:end]))
    return nan_max(differences)


def _packed(model: Any, documents: list[Tensor], repair: bool):
    logits = _forward(model, documents, repair)
    losses = [
        _loss(row, ids) for row, ids in zip(_split(logits, documents), documents, strict=True)
    ]
    return logits.detach(), *_differentiate(model, losses)


def _one_by_one(model: Any, documents: list[Tensor]):
    logits = [model(input_ids=ids, use_cache=False).logits for ids in documents]
    losses = [_loss(row, ids) for row, ids in zip(logits, documents, strict=True)]
    return torch.cat(logits, 1).detach(), *_differentiate(model, losses)


def _forward(model: Any, documents: Sequence[Tensor], repair: bool) -> Tensor:
    batch = packed_batch(documents)
    tokens = batch["input_ids"].shape[1]
    with document_mask(batch["cu_seq_lens_q"], tokens) if repair else nullcontext():
        return model(**batch).logits


def _split(logits: Tensor, documents: list[Tensor]) -> list[Tensor]:
    return list(logits.split([d.shape[1] for d in documents], 1))


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")


def _differentiate(model: Any, losses: list[Tensor]) -> tuple[float, list[Tensor]]:
    loss = torch.stack(losses).sum()
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), list(gradients)


def _paged_steps(model: Any, documents: list[Tensor], page_size: int):
    """Feed the documents in uneven chunks; yield each step's spans and logits."""
    lengths = [d.shape[1] for d in documents]
    allocator = PageAllocator(2 * sum(-(-n // page_size) for n in lengths), page_size)
    reference = next(model.parameters())
    shapes = layer_shapes(model)
    cache = PagedCache(allocator.num_pages, page_size, shapes, reference.dtype, reference.device)
    states = StatePool(stateful_parts(model), len(documents), reference.device)
    done = [0] * len(documents)
    step = 0
    while done != lengths:
        ends = [
            min(n, start + _chunk(step, i))
            for i, (n, start) in enumerate(zip(lengths, done, strict=True))
        ]
        spans = list(zip(done, ends, strict=True))
        for index, end in enumerate(ends):
            num_pages = len(allocator.pages(index)) if index in allocator.owners else 0
            allocator.allocate(index, -(-end // page_size) - num_pages)
        yield spans, _paged_forward(model, documents, spans, allocator, cache, states)
        done, step = ends, step + 1


def _chunk(step: int, index: int) -> int:
    """Return sizes that mix decodes, prefills and chunked prefills in one step."""
    return (1, 5, 17, 2)[(step + index) % 4]


def _paged_forward(
    model: Any,
    documents: list[Tensor],
    spans: list[tuple[int, int]],
    allocator: PageAllocator,
    cache: PagedCache,
    states: StatePool,
) -> Tensor:
    device, size = documents[0].device, cache.page_size
    tables = [allocator.pages(i) for i in range(len(spans))]
    width = max(map(len, tables))
    tokens_at = [(i, p) for i, (start, end) in enumerate(spans) for p in range(start, end)]

    def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    ends = [0]
    for start, end in spans:
        ends.append(ends[-1] + end - start)
    pages = Pages(
        cache,
        ints([t + [0] * (width - len(t)) for t in tables]),
        ints([end for _, end in spans]),
        ints([tables[i][p // size] * size + p % size for i, p in tokens_at], torch.int64),
        max(end for _, end in spans),
    )
    varlen = Varlen(ints(ends), max(b - a for a, b in pairwise(ends)), pages)
    tokens = torch.cat([documents[i][0, a:b] for i, (a, b) in enumerate(spans)])[None]
    positions = ints([p for _, p in tokens_at], torch.int64)[None]
    starts, lengths = [start for start, _ in spans], [end - start for start, end in spans]
    pooled = states.step(range(len(spans)), starts, lengths)
    with step_context(model, varlen), frozen_rotary(model.modules()), pooled:
        return model(
            input_ids=tokens, position_ids=positions, use_cache=False, varlen=varlen
        ).logits[0]


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0
