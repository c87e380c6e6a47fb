"""Checks before the first step, and the banner that describes the run.

nopad: llama, attention nopad, document boundaries from cu_seq_lens, leak check 0.0
nopad: 1,024 packs of 8192 tokens per epoch, fill 99.8%, 9.1 sequences per pack; 12 samples ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ...attention.hf import (
    SequenceLimit,
    document_mask,
    eval_mode,
    install_mask_patch,
    rotary_limit,
    sequence_limit,
)
from ...collators import PackedCollator
from ...packing import IGNORE_INDEX, Pack, PackedDataset, Planner, Sample
from ...runtime import rank, sum_over_ranks
from ..data.loader import PackedLoader

MAX_PLANNED = 1 << 20
"""Samples that are planned for the banner; the figures of larger data are extrapolated."""


def check_run(model: Any, data: PackedDataset, collator: Any = None) -> list[str]:
    """Return the lines of the banner; raise if this model, data and collator would train wrongly.

    Call it under the training's autocast: some attention backends take low precision only.
    """
    config: Any = model.config.get_text_config()
    attention = getattr(config, "_attn_implementation", "eager")
    _check_lengths(data, config)
    _check_weights(model, collator)
    leak, boundaries = measure_leak(model, collator), _boundaries(attention)
    if leak:
        boundaries = _try_mask_repair(model, collator, leak)
    model_line = (
        f"{config.model_type}, attention {attention}, document boundaries from {boundaries}, "
        "leak check 0.0"
    )
    return [model_line, *_describe_plan(data)]


def print_banner(lines: list[str]) -> None:
    """Print the banner on the first rank."""
    if rank() == 0:
        for line in lines:
            tqdm.write(f"nopad: {line}")


def measure_leak(model: Any, collator: Any = None, mask_documents: bool = False) -> float:
    """Change the first of several packed samples; return how far the others' logits move.

    The result is relative to the largest logit; correct packing gives 0.0. torch.compile is off
    meanwhile: it would specialize on the small shape of this check.

    mask_documents: pass the boundaries to the stock masks.
    """
    collator = collator or PackedCollator()
    vocab_size = model.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, vocab_size, length) for length in _check_sample_lengths(collator)]
    if len(samples) < 2:
        return 0.0  # a pack of one sequence cannot leak
    changed = [(samples[0] + 1) % vocab_size, *samples[1:]]
    with eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        before, after = (
            _logits(model, collator, ids, mask_documents) for ids in (samples, changed)
        )
    moved = (before - after)[0, len(samples[0]) :].abs().max() / before.abs().max()
    weight = next(model.parameters())
    is_fp32 = weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)
    rounding = 1e-5 if is_fp32 else 4e-3
    return 0.0 if moved < rounding else float(moved)


def _check_sample_lengths(collator: Any) -> list[int]:
    """Lengths of the samples to pack, within the collator's fixed shapes."""
    max_samples = getattr(collator, "fixed_sequences", None) or 3
    max_length = getattr(collator, "max_length", None) or 9
    return [min(length, max_length) for length in (6, 9, 5)][:max_samples]


def _logits(
    model: Any, collator: Any, samples: list[np.ndarray], mask_documents: bool
) -> torch.Tensor:
    device = next(model.parameters()).device
    # A full pack, as in training: collators that pad rows then have nothing to pad.
    batch = collator(Pack.of([Sample(ids) for ids in samples], budget=sum(map(len, samples))))
    batch = {k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    if not mask_documents:
        return model(**batch).logits.float()
    with document_mask(batch["cu_seq_lens_q"], batch["input_ids"].shape[1]):
        return model(**batch).logits.float()


def _boundaries(attention: str) -> str:
    return "cu_seq_lens" if attention == "nopad" or "flash" in attention else "position_ids"


def _try_mask_repair(model: Any, collator: Any, leak: float) -> str:
    """Have the attached loss pass document ids to the stock masks, if that stops the leak."""
    config, way_out = model.config.get_text_config(), 'use attn_implementation="nopad"'
    attention = getattr(config, "_attn_implementation", "eager")
    can_mask = attention != "nopad" and install_mask_patch()
    if can_mask and not measure_leak(model, collator, mask_documents=True):
        if hasattr(model, "nopad_loss"):
            model.nopad_loss.mask_documents = True
            return "the attention mask"
        way_out = "call nopad.trainer.loss.attach_loss(model) first, which repairs its masks"
    raise ValueError(
        f"{config.model_type} with attn_implementation={attention!r} lets packed samples see each "
        f"other (logits move by {leak:.2g}): {way_out}, or train without packing; check=False "
        "skips this check"
    )


def _check_lengths(data: PackedDataset, config: Any) -> None:
    limit, longest = _length_limit(config), _longest(data)
    if limit is not None and longest > limit.length:
        raise ValueError(
            f"a sequence of {longest} tokens is beyond {limit.reason}: lower the budget to "
            f"{limit.length}, or choose a model with a longer context"
        )


def _longest(data: PackedDataset) -> int:
    """Return the length of the longest sequence; 0 if lengths are unknown before reading."""
    longest = 0 if data.lengths is None else int(data.lengths.max(initial=0))
    return min(longest, data.settings["budget"])


def _length_limit(config: Any) -> SequenceLimit | None:
    """Return the longest sequence that a pack may hold under this attention."""
    is_nopad = getattr(config, "_attn_implementation", None) == "nopad"
    limit = sequence_limit(config) if is_nopad else rotary_limit(config)
    if limit is not None:
        reason = f"the {limit.length} that packs of this model may hold ({limit.reason})"
        limit = limit._replace(reason=reason)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or (limit is not None and limit.length <= positions):
        return limit
    return SequenceLimit(positions, f"the model's {positions} positions", alone=False)


def _check_weights(model: nn.Module, collator: Any) -> None:
    if getattr(collator, "mean", "token") == "sample" and not hasattr(model, "nopad_loss"):
        raise ValueError(
            'mean="sample" needs the exact loss: call nopad.trainer.loss.attach_loss(model) first'
        )


def _describe_plan(data: PackedDataset) -> list[str]:
    """Describe the number of packs, their fill, and the samples that overflow."""
    lengths, budget, max_packs = data.lengths, data.settings["budget"], data.max_packs
    if lengths is None or not len(lengths):
        total = "" if max_packs is None else f"{max_packs:,} "
        return [f"{total}packs of {budget} tokens; lengths are unknown before reading"]
    planned = lengths[:MAX_PLANNED]
    names = ("budget", "pool", "strategy", "overflow", "pad_to_multiple_of")
    planner = Planner(**{name: data.settings[name] for name in names})
    sequences = len(planner.feed(planned).items) + len(planner.finish().items)
    counts, is_estimate = planner.counts, len(lengths) > len(planned)
    packs = round(counts.packs * len(lengths) / len(planned))
    per_epoch = f"{'about ' * is_estimate}{packs:,} packs of {budget} tokens per epoch"
    if max_packs is not None:
        per_epoch = f"{max_packs:,} packs in total, {per_epoch}"
    fill = counts.packed_tokens / max(1, counts.packs * budget)
    overflow = f"{counts.split:,} samples split"
    if is_estimate:
        overflow = f"of the first {len(planned):,} samples, {counts.split:,} split"
    return [
        f"{per_epoch}, fill {fill:.1%}, {sequences / max(1, counts.packs):.1f} sequences per pack; "
        f"{overflow}, {counts.truncated:,} truncated, {counts.dropped:,} dropped"
    ]


def check_first_batches(loader: PackedLoader, model: Any) -> None:
    """Have a loader refuse batches that do not fit the model before they are trained on."""
    config: Any = model.config.get_text_config()
    limit = _length_limit(config)
    if limit is not None:
        loader.max_positions, loader.limit_name = limit.length, limit.reason
    loader.first_step_check = partial(check_batches, vocab_size=config.vocab_size)


def check_batches(batches: list[dict], vocab_size: int) -> None:
    """Refuse the batches of the first step if token ids or labels cannot belong to the model."""
    label_tokens = 0
    for batch in batches:
        labels = batch["labels"][batch["labels"] != IGNORE_INDEX]
        label_tokens += len(labels)
        for name, ids in (("token", batch["input_ids"].flatten()), ("label", labels)):
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if len(outside):
                raise ValueError(
                    f"{name} {int(outside[0])} is outside the model's vocabulary of {vocab_size}: "
                    "the data was tokenized for another model"
                )
    if not sum_over_ranks(label_tokens):
        raise ValueError(
            "no label of the first step counts for the loss: check the loss mask "
            "(a chat template without marked answers leaves nothing to learn)"
        )
