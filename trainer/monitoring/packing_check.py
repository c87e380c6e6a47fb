"""Does packing change what a model computes? Rows of random samples, packed and one by one.

    leak         the first sample is changed: the logits of the others may not move at all
    difference   the logits of a packed sample are those of the sample alone, but for rounding

The rows exceed every length that the model names and the budget exceeds (`check_rows`). Each is run
once and its samples once, without gradients: about the cost of one training step per length.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention.hf import check_rows, document_mask, eval_mode
from ...collators import PackedCollator
from ...packing import Pack, Sample

_EDGES = 4, 8
"""Tokens at the start and the end of each sample whose logits are compared."""


def measure_leak(
    model: Any,
    collator: Any = None,
    mask_documents: bool = False,
    lengths: list[int] | None = None,
) -> float:
    """Change the first of several packed samples; return how far the others' logits move.

    The result is relative to the largest logit; correct packing gives 0.0.

    mask_documents: pass the boundaries to the stock masks.
    lengths: of the samples.
    """
    collator = collator or PackedCollator()
    lengths = lengths or _short_row(collator)
    if len(lengths) < 2:
        return 0.0  # a pack of one sequence cannot leak
    samples = _samples(model, lengths)
    vocab_size = model.config.get_text_config().vocab_size
    changed = [(samples[0] + 1) % vocab_size, *samples[1:]]
    before, after = (
        torch.cat(_logits(model, collator, row, mask_documents)[1:]) for row in (samples, changed)
    )
    moved = (before - after).abs().max() / before.abs().max()
    return 0.0 if moved < (1e-5 if _is_fp32(model) else 4e-3) else float(moved)


def _short_row(collator: Any) -> list[int]:
    """Return the lengths of a few samples, within the collator's fixed shapes."""
    max_length = getattr(collator, "max_length", None) or 32
    return check_rows(None, 32, max_length, getattr(collator, "fixed_sequences", None))[0][0]


def measure_difference(
    model: Any, collator: Any, lengths: list[int], mask_documents: bool = False
) -> float:
    """Return how far packed samples are from the samples alone; rounding counts as 0.0.

    Of a sample in low precision the median token counts: a few tokens of a mixture of experts may
    be routed otherwise.
    """
    collator = collator or PackedCollator()
    samples = _samples(model, lengths)
    packed = _logits(model, collator, samples, mask_documents)
    differences = []
    # The samples that only fill the row up to the last two are not run alone.
    for sample, together in list(zip(samples, packed, strict=True))[-3:]:
        (alone,) = _logits(model, collator, [sample], mask_documents)
        by_token = (together - alone).abs().amax(-1) / alone.abs().max()
        differences.append(float(by_token.max() if _is_fp32(model) else by_token.median()))
    largest = float(np.max(differences))  # NaN if one is
    return 0.0 if largest < (1e-3 if _is_fp32(model) else 0.05) else largest


def measure_shard_difference(model: Any, collator: Any, lengths: list[int]) -> float:
    """Return how far the losses of a row spread over ranks are from the whole row's.

    Rounding counts as 0.0. Call it on every rank of the group.
    """
    samples, loss = _samples(model, lengths), model.nopad_loss
    pack = Pack.of([Sample(ids) for ids in samples], budget=sum(map(len, samples)))
    batch = _to_device((collator or PackedCollator())(pack), model)
    shards, found = loss.row_shards, []
    with eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for loss.row_shards in (None, shards):
            model(**batch)
            found.append(loss.token_losses.float())
    by_token = (found[0] - found[1]).abs() / found[0].abs().max()
    largest = float(by_token.max() if _is_fp32(model) else by_token.median())
    return 0.0 if largest < (1e-4 if _is_fp32(model) else 0.05) else largest


def _to_device(batch: dict[str, Any], model: Any) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _is_fp32(model: Any) -> bool:
    weight = next(model.parameters())
    return weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)


def _samples(model: Any, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    vocab_size = model.config.get_text_config().vocab_size
    return [rng.integers(0, vocab_size, length) for length in lengths]


def _logits(
    model: Any, collator: Any, samples: list[np.ndarray], mask_documents: bool
) -> list[Tensor]:
    """Return the logits at the edges of each sample.

    torch.compile is off meanwhile: it would specialize on the shapes of this check.
    """
    device = next(model.parameters()).device
    # A full pack, as in training: collators that pad rows then have nothing to pad.
    batch = collator(Pack.of([Sample(ids) for ids in samples], budget=sum(map(len, samples))))
    batch = {k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}
    batch = _to_device(batch, model)
    kept, counts = _edges([len(ids) for ids in samples])
    keeps = "logits_to_keep" in signature(model.forward).parameters
    if keeps:  # the logits of a long row would take more memory than training does
        batch["logits_to_keep"] = kept.to(device)
    with eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if mask_documents:
            with document_mask(batch["cu_seq_lens_q"], batch["input_ids"].shape[1]):
                logits = model(**batch).logits[0]
        else:
            logits = model(**batch).logits[0]
    return list((logits if keeps else logits[kept.to(device)]).float().split(counts))


def _edges(lengths: list[int]) -> tuple[Tensor, list[int]]:
    """Return the places in a row whose logits are compared, and how many each sample has.

    >>> places, counts = _edges([3, 20])
    >>> places.tolist(), counts
    ([0, 1, 2, 3, 4, 5, 6, 15, 16, 17, 18, 19, 20, 21, 22], [3, 12])
    """
    first, last = _EDGES
    places, counts, start = [], [], 0
    for length in lengths:
        own = [i for i in range(length) if i < first or i >= length - last]
        places += [start + i for i in own]
        counts.append(len(own))
        start += length
    return torch.tensor(places), counts
