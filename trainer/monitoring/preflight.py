"""Before the first step: refuse what would train wrongly, and say what is about to happen.

nopad: llama, attention nopad, boundaries by cu_seq_lens, leak self-test 0.0
nopad: 1,024 packs of 8192 an epoch, fill 99.8 %, 9.1 samples a pack; split 12, truncated 0, ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ...attention.hf import document_mask, eval_mode, install_mask_patch
from ...collators import PackedCollator
from ...packing import IGNORE_INDEX, Pack, PackedDataset, Planner, Sample
from ...runtime import rank, sum_over_ranks
from ..data.loader import PackedLoader

MOST_LENGTHS = 1 << 20
"""How many documents are planned to foretell an epoch."""


def check_run(model: Any, data: PackedDataset, collator: Any = None) -> list[str]:
    """Raise where this model, data and collator do not go together; else return the banner.

    Call it under the autocast of the training: some attention knows low precision only.
    """
    config: Any = model.config.get_text_config()
    attention = getattr(config, "_attn_implementation", "eager")
    _check_lengths(data, config)
    _check_weights(model, collator)
    found, how = leak(model, collator), _route(attention)
    if found:
        how = _repaired(model, collator, found)
    first = f"{config.model_type}, attention {attention}, boundaries by {how}, leak self-test 0.0"
    return [first, *_foretell(data)]


def print_banner(lines: list[str]) -> None:
    """Print the banner, on the first rank."""
    if rank() == 0:
        for line in lines:
            tqdm.write(f"nopad: {line}")


def leak(model: Any, collator: Any = None, apart: bool = False) -> float:
    """Change the first of some packed samples; return how far the others' logits move.

    The movement is relative to the largest logit; 0.0 is what packing promises. Nothing is
    compiled for it: the small shape would be remembered as one of the run's.
    """
    collator = collator or PackedCollator()
    vocabulary = model.config.get_text_config().vocab_size
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, vocabulary, length) for length in _probed(collator)]
    if len(rows) < 2:
        return 0.0  # a sequence alone in its pack has no neighbour
    other = [(rows[0] + 1) % vocabulary, *rows[1:]]
    with eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        before, after = (_logits(model, collator, ids, apart) for ids in (rows, other))
    moved = (before - after)[0, len(rows[0]) :].abs().max() / before.abs().max()
    weight = next(model.parameters())
    exact = weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)
    rounding = 1e-5 if exact else 4e-3
    return 0.0 if moved < rounding else float(moved)


def _probed(collator: Any) -> list[int]:
    """Lengths of samples to pack, of which the collator has room for so many and so long ones."""
    room = getattr(collator, "fixed_sequences", None) or 3
    longest = getattr(collator, "max_length", None) or 9
    return [min(length, longest) for length in (6, 9, 5)][:room]


def _logits(model: Any, collator: Any, rows: list[np.ndarray], apart: bool) -> torch.Tensor:
    device = next(model.parameters()).device
    # A pack, as in training, and a full one: collators that fill rows up need not.
    batch = collator(Pack.of([Sample(ids) for ids in rows], budget=sum(map(len, rows))))
    batch = {k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    if not apart:
        return model(**batch).logits.float()
    with document_mask(batch["cu_seq_lens_q"], batch["input_ids"].shape[1]):
        return model(**batch).logits.float()


def _route(attention: str) -> str:
    return "cu_seq_lens" if attention == "nopad" or "flash" in attention else "position_ids"


def _repaired(model: Any, collator: Any, found: float) -> str:
    """Have the stock masks told the documents from now on, if that stops the leak."""
    config, way_out = model.config.get_text_config(), 'use attn_implementation="nopad"'
    attention = getattr(config, "_attn_implementation", "eager")
    if attention != "nopad" and install_mask_patch() and not leak(model, collator, apart=True):
        if hasattr(model, "nopad_loss"):
            model.nopad_loss.apart = True
            return "document numbers in the mask"
        way_out = "call nopad.trainer.loss.attach_loss(model) first, which repairs its masks"
    raise ValueError(
        f"{config.model_type} with attn_implementation={attention!r} lets packed samples see each "
        f"other (logits move by {found:.2g}): {way_out}, or train without packing; check=False "
        "trains regardless"
    )


def _check_lengths(data: PackedDataset, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    longest = 0 if data.lengths is None else int(data.lengths.max(initial=0))
    longest = min(longest, data.settings["budget"])
    if most is not None and longest > most:
        raise ValueError(
            f"a sequence of {longest} tokens is beyond the model's {most} positions: "
            f"lower the budget to {most}, or choose a model that reaches farther"
        )


def _check_weights(model: nn.Module, collator: Any) -> None:
    if getattr(collator, "mean", "token") == "sample" and not hasattr(model, "nopad_loss"):
        raise ValueError(
            'mean="sample" needs the exact loss: call nopad.trainer.loss.attach_loss(model) first'
        )


def _foretell(data: PackedDataset) -> list[str]:
    """Say how many packs come, how full, and what becomes of long samples."""
    known, budget, asked = data.lengths, data.settings["budget"], data.max_packs
    if known is None or not len(known):
        run = "" if asked is None else f"{asked:,} "
        return [f"{run}packs of {budget}, lengths not known before reading"]
    lengths = known[:MOST_LENGTHS]
    names = ("budget", "pool", "strategy", "overflow", "pad_to_multiple_of")
    planner = Planner(**{name: data.settings[name] for name in names})
    held = len(planner.feed(lengths).items) + len(planner.finish().items)
    counts, cut = planner.counts, len(known) > len(lengths)
    packs = round(counts.packs * len(known) / len(lengths))
    whole, kind = f"{'about ' * cut}{packs:,}", f"packs of {budget}"
    run = f"{whole} {kind}" if asked is None else f"{asked:,} {kind} in all, {whole}"
    fill = counts.packed_tokens / max(1, counts.packs * budget)
    return [
        f"{run} an epoch, fill {fill:.1%}, "
        f"{held / max(1, counts.packs):.1f} samples or parts a pack; "
        f"{f'of the first {len(lengths):,} samples ' * cut}split {counts.split:,}, "
        f"truncated {counts.truncated:,}, dropped {counts.dropped:,}"
    ]


def guard(loader: PackedLoader, model: Any) -> None:
    """Have a loader refuse, before they are stepped, batches that the model was not made for."""
    config: Any = model.config.get_text_config()
    loader.positions = getattr(config, "max_position_embeddings", None)
    loader.first_check = partial(check_batches, vocabulary=config.vocab_size)


def check_batches(batches: list[dict], vocabulary: int) -> None:
    """Refuse the first step's batches if they cannot be what the model was meant for."""
    counted = 0
    for batch in batches:
        labels = batch["labels"][batch["labels"] != IGNORE_INDEX]
        counted += len(labels)
        for name, ids in (("token", batch["input_ids"].flatten()), ("label", labels)):
            outside = ids[(ids < 0) | (ids >= vocabulary)]
            if len(outside):
                raise ValueError(
                    f"{name} {int(outside[0])} is outside the model's vocabulary of {vocabulary}: "
                    "the data was tokenized for another model"
                )
    if not sum_over_ranks(counted):
        raise ValueError(
            "no label of the first step counts for the loss: check the loss mask "
            "(a chat template without marked answers leaves nothing to learn)"
        )
