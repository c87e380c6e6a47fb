"""`check_run`: before the first step, refuse runs that would train wrongly; return the banner.

nopad: llama, attention nopad, document boundaries from cu_seq_lens, leak check 0.0
nopad: 1,024 packs of 8192 tokens per epoch, fill 99.8%, 9.1 sequences per pack; 12 samples ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...attention.hf import (
    install_mask_patch,
    is_encoder,
    nan_max,
    probe_rows,
    sequence_limit,
    unsupported_reason,
    zero_weights_filled,
)
from ...collators import MaskedCollator
from ...packing import IGNORE_INDEX, PackedDataset
from ...packing.readers import PlannedPacks, estimate_report
from ...runtime import Layout, gather_objects, sum_over_ranks, unwrap_model
from ..banner import print_banner
from ..data.loader import PackedLoader
from ..data.model_limits import ModelLimits, length_limit, shorter_samples_advice
from ..fsdp_unshard import reshard
from ..loss.attached_loss import find_loss
from .flops import describe_slow_bf16
from .packing_difference import (
    image_samples,
    measure_difference,
    measure_leak,
    measure_shard_difference,
    passes_gradients,
    shape_limits,
)

_MASK = "the attention mask"
"""Source of the boundaries where the masks of stock attention were repaired."""
MAX_PLANNED = 1 << 20
"""Samples that are planned for the banner; the figures of larger data are extrapolated."""


def check_run(
    model: Any, data: PackedDataset, collator: Any = None, layout: Layout | None = None
) -> list[str]:
    """Return the lines of the banner; raise if this model, data and collator would train wrongly.

    Call it on every rank, under the training's autocast: some attention backends take low precision
    only.
    """
    config: Any = model.config.get_text_config()
    attention = config._attn_implementation
    _check_lengths(data, config)
    _check_weights(model, collator)
    _check_labels(model, data, collator)
    rows, boundaries = _check_rows(data, config, collator), _boundaries(model, attention)
    draw = _image_samples(model, data)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rows[0] = rows[0][-1:]  # a teacher keeps no activations: a long row may not fit
    check = partial(_find_fault, model, collator, rows, data.settings["budget"], draw)
    try:
        # A model may get its first pack in a validation, which Lightning runs in inference mode.
        with torch.inference_mode(False), zero_weights_filled(model):
            fault = check()
            if fault:
                boundaries = _try_mask_repair(model, check, fault)
        _check_shards(model, collator, rows[0][-1])
    finally:
        reshard(model)
    model_line = (
        f"{config.model_type}, attention {attention}, document boundaries from {boundaries}, "
        "leak check 0.0"
    )
    ranks = [] if layout is None or layout.world_size == 1 else [layout.describe()]
    cached = [] if data.token_cache is None else data.token_cache.messages
    return [model_line, *ranks, *_describe_plan(data), *cached, *describe_slow_bf16(model)]


def print_resumed(checkpoint: Any, data: PackedDataset) -> None:
    """Print, on the first rank, where a run continues: at the position that was just loaded."""
    index = data.state_dict()["position"]["index"]
    print_banner([f"resumed from {Path(checkpoint).name}, pack {index:,}"])


def describe_speedups(loss: Any, layers: Any) -> str:
    """Return the banner's line about the loss and the layers that train.

    loss, layers: the results of `attach_loss` and `prepare_layers`.
    """
    states = loss.reset_states.names
    return (
        f"loss {'without' if loss.fused else 'with'} logits, {layers.describe()}"
        f"{', document by document (slow): ' + ', '.join(states) if states else ''}"
    )


def _boundaries(model: Any, attention: str) -> str:
    loss = find_loss(model)
    if loss is not None and loss.mask_documents:
        return _MASK  # an earlier check has repaired the masks
    return "cu_seq_lens" if attention == "nopad" or "flash" in attention else "position_ids"


def _check_rows(data: PackedDataset, config: Any, collator: Any) -> dict[int, list[list[int]]]:
    budget, limit = data.settings["budget"], length_limit(config)
    longest = _longest(data) or data.settings["max_length"] or budget
    longest = longest if limit is None else min(longest, limit.length)
    max_samples, max_length = shape_limits(collator)
    return probe_rows(config, budget, max(min(longest, max_length or longest), 1), max_samples)


def _find_fault(
    model: Any,
    collator: Any,
    rows: dict[int, list[list[int]]],
    budget: int,
    draw: Any = None,
    mask: bool = False,
) -> str:
    """Describe what packing changes for this model; "" if nothing."""
    passes = passes_gradients(model, collator, rows[0][-1], budget, mask)
    if not all(gather_objects(passes)):  # ranks leave together, or some would wait
        raise ValueError(
            "no gradient passes between the tokens of a sample, so the layers would not train: "
            "they run without gradients, or torch.compile is wrong, which layers='stock' avoids; "
            "check=False skips this check"
        )
    leaks = [measure_leak(model, collator, mask, row, budget) for row in rows[0]]
    if draw is not None:
        leaks.append(measure_leak(model, collator, mask, draw=draw))
    leak = nan_max(gather_objects(nan_max(leaks)))
    if math.isnan(leak):
        raise ValueError(
            "the model's logits or their gradients are not numbers (NaN or infinite): are its "
            "weights damaged?"
        )
    if leak:
        return f"lets packed samples see each other (gradients between them: {leak:.2g})"
    for length, lengths in [(limit, row) for limit in rows for row in rows[limit]]:
        difference = measure_difference(model, collator, lengths, mask, budget)
        if difference:
            where = f" in rows of more than {length} tokens" if length else ""
            return (
                f"computes packed samples differently than alone{where} (logits differ by "
                f"{difference:.2g})"
            )
    difference = draw and measure_difference(model, collator, [], mask, draw=draw)
    if difference:
        return f"computes packed images differently than alone (by {difference:.2g})"
    return ""


def _image_samples(model: Any, data: PackedDataset) -> Any:
    """Return what draws samples with images, if the data is made by a processor."""
    processor = None if data.encoder is None else data.encoder.processor
    if processor is None:
        return None
    inputs = signature(unwrap_model(model).forward).parameters
    if "pixel_values" not in inputs:
        raise ValueError(
            f"{type(model).__name__} takes no images: pass PackedDataset(tokenizer=) the tokenizer "
            "instead of a processor, or load the model with AutoModelForImageTextToText"
        )
    draw = partial(image_samples, processor, data.settings["budget"])
    config: Any = model.config.get_text_config()
    attention = config._attn_implementation
    names = {name for each in draw(0) if each.images for name in each.images.model_inputs()}
    both = getattr(config, "use_bidirectional_attention", None) and "mm_token_type_ids" in names
    if "flash" in attention and (both or "token_type_ids" in names):
        raise ValueError(
            f"the tokens of an image see each other in {type(model).__name__}, which {attention} "
            'ignores: load it with attn_implementation="nopad"'
        )
    return draw


def _check_shards(model: Any, collator: Any, lengths: list[int]) -> None:
    """Raise if a row spread over sequence-parallel ranks has other losses than the whole row."""
    loss = find_loss(model)
    if loss is None or loss.row_shards is None:
        return
    difference = nan_max(gather_objects(measure_shard_difference(model, collator, lengths)))
    if difference:
        raise ValueError(
            f"the losses of {model.config.model_type} change by {difference:.2g} when a row is "
            f"spread over {loss.row_shards.ranks} ranks: train without sequence parallelism; "
            "check=False skips this check"
        )


def _try_mask_repair(model: Any, check: Callable[..., str], fault: str) -> str:
    """Make the attached loss pass document ids to the stock masks, if that makes packing right."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    advice = _other_attention(model, attention)
    can_mask = attention != "nopad" and install_mask_patch()
    if can_mask and not check(mask=True):
        if (loss := find_loss(model)) is not None:
            loss.mask_documents = True
            return _MASK
        advice = "call nopad.trainer.loss.attach_loss(model) first, which repairs its masks, or "
    raise ValueError(
        f"{config.model_type} with attn_implementation={attention!r} {fault}: {advice}train "
        "without packing; check=False skips this check"
    )


def _other_attention(model: Any, attention: str) -> str:
    """Advise `nopad` if it would be right."""
    if attention == "nopad" or not (is_encoder(model.config) or _runs_as_nopad(model)):
        return ""
    limit = sequence_limit(model.config.get_text_config())
    within = "" if limit is None else f" with samples of at most {limit.length} tokens"
    return f'use attn_implementation="nopad"{within}, or '


def _runs_as_nopad(model: Any) -> bool:
    return model.get_output_embeddings() is None or unsupported_reason(model) is None


def _check_lengths(data: PackedDataset, config: Any) -> None:
    limit, longest = length_limit(config), _longest(data)
    if limit is not None and longest > limit.length:
        raise ValueError(
            f"a sequence of {longest} tokens is beyond {limit.reason}: "
            f"{shorter_samples_advice(limit.length)}"
        )


def _longest(data: PackedDataset) -> int:
    """Return the length of the longest sequence; 0 if lengths are unknown before reading."""
    longest = 0 if data.lengths is None else int(data.lengths.max(initial=0))
    return min(longest, data.settings["budget"], data.settings["max_length"] or longest)


def _check_weights(model: nn.Module, collator: Any) -> None:
    if getattr(collator, "mean", "token") == "sample" and find_loss(model) is None:
        raise ValueError(
            'mean="sample" needs the exact loss: call nopad.trainer.loss.attach_loss(model) first'
        )


def _check_labels(model: Any, data: PackedDataset, collator: Any) -> None:
    """Raise if the labels of the data are not those that the head of the model learns."""
    loss = find_loss(model)
    head = "causal" if loss is None else loss.head
    name, needs = type(model).__name__, head in ("token", "document")
    if needs and not data.is_labelled:
        raise ValueError(
            f"{name} learns the label of each {head}, but the data has none: pass "
            "PackedDataset(label_column=...), the name of their column"
        )
    if data.is_labelled and not needs:
        raise ValueError(
            f"the data has labels of documents, but {name} predicts tokens: omit label_column=, or "
            "load the model with AutoModelForSequenceClassification"
        )
    if (head == "masked") != isinstance(collator, MaskedCollator):
        is_masked = head == "masked"
        raise ValueError(
            f"{name} predicts {'masked tokens' if is_masked else 'no masked tokens'}: "
            f"{'collate with MaskedCollator(tokenizer)' if is_masked else 'omit MaskedCollator'}"
        )
    if data.settings["pad_to_multiple_of"] != 1 and is_encoder(model.config.get_text_config()):
        raise ValueError(f"pad_to_multiple_of= adds padding that {name} would read: omit it")


def _describe_plan(data: PackedDataset) -> list[str]:
    """Describe the number of packs, their fill, and the samples that overflow."""
    budget, max_packs, limit = data.settings["budget"], data.max_packs, data.settings["max_length"]
    if data.lengths is None or not len(data.lengths):
        total = "" if max_packs is None else f"{max_packs:,} "
        within = "" if limit is None else f", samples of at most {limit}"
        packs = data.estimate() if data.lengths is None else None
        unknown = "lengths are unknown before reading"
        if packs is not None:
            unknown += f"; about {packs:,} per epoch, estimated from the first rows"
        return [f"{total}packs of {budget} tokens{within}; {unknown}"]
    report, about = _plan_report(data)
    packs = report.get("epoch_packs", report["packs"])
    per_epoch = f"{'about ' if about else ''}{packs:,} packs of {budget} tokens per epoch"
    if max_packs is not None:
        per_epoch = f"{max_packs:,} packs in total, {per_epoch}"
    overflow = f"{report['split']:,} samples split"
    if about:
        overflow = f"of the first {about:,} samples, {report['split']:,} split"
    if limit is not None:
        overflow = f"samples of at most {limit} tokens: {overflow}"
    return [
        f"{per_epoch}, fill {report['fill']:.1%}, "
        f"{report['sequences'] / max(1, report['packs']):.1f} sequences per pack; "
        f"{overflow}, {report['truncated']:,} truncated, {report['dropped']:,} dropped",
        *_describe_mixture(report, data.source_names, max_packs),
    ]


def _plan_report(data: PackedDataset) -> tuple[dict, int]:
    """Return the report of an epoch, or of its first samples, and how many these are."""
    assert isinstance(data.reader, PlannedPacks)
    estimated = estimate_report(data.reader, MAX_PLANNED)
    return (data.report(), 0) if estimated is None else (estimated, MAX_PLANNED)


def _describe_mixture(report: dict, names: list[str], max_packs: int | None) -> list[str]:
    """Describe the share of each source in an epoch, and how often the epoch reads it."""
    if len(report.get("laps", ())) < 2:
        return []
    sources = zip(names, report["shares"], report["laps"], strict=True)
    parts = (
        f"{name} has {share:.1%} of the tokens, read {_times(laps)}"
        for name, share, laps in sources
    )
    is_cut = max_packs is not None and max_packs < report.get("epoch_packs", report["packs"])
    epoch = f"a full epoch, not its first {max_packs:,} packs alone" if is_cut else "an epoch"
    return [f"of {epoch}, {'; '.join(parts)}"]


def _times(laps: float) -> str:
    """Say how often.

    >>> _times(1.002), _times(2.5)
    ('once', '2.5 times')
    """
    number = f"{laps:.2g}"
    return "once" if number == "1" else f"{number} times"


def check_first_batches(loader: PackedLoader, *models: Any) -> None:
    """Make a loader refuse batches that do not fit the models before they are trained on."""
    loader.limits = ModelLimits.of(*models)
    loader.first_step_check = partial(check_batches, limits=loader.limits)


def check_batches(batches: list[dict], limits: ModelLimits) -> bool:
    """Refuse the batches of a step if token ids cannot belong to the model.

    Returns whether any label, on any rank, counts for the loss.
    """
    label_tokens = 0
    for batch in batches:
        label_tokens += int((batch["labels"] != IGNORE_INDEX).sum())
        limits.check_ids(batch)
    return bool(sum_over_ranks(label_tokens))
