"""Measure whether packing changes what a model computes: random rows, packed and one by one.

    leak         no gradient of a sample's logits reaches another sample: exactly none
    difference   the logits of a packed sample are those of the sample alone, except for rounding

Rows are run as in training: with gradients, in training mode, with the attention kernels and layers
of the training, including compiled layers. There are rows beyond every length that the model names,
if the budget exceeds it (`probe_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention.hf import (
    embeddings_replaced,
    eval_mode,
    has_gradient_inside,
    leaked_gradient,
    module_mode,
    nan_max,
    probe_rows,
    probed_logits,
)
from ...collators import NESTED, MaskedCollator, PackedCollator
from ...packing import Pack, Sample
from ...packing.encoding import image_sample
from ...runtime import gather_objects, preserve_rng, rng_states

Draw = Callable[[int], list[Sample]]
"""Returns the samples of a row, by a seed."""

_NOISE_FACTOR = 4
"""How much more than the model's own rounding packed samples may differ from samples alone."""
_DRAWS = 8
"""Rows of random samples that must all show a difference."""
_FIRST_TOKENS, _MIN_FOR_MEDIAN = 4, 8
"""Tokens at the start of a sample; tokens that a sample needs for a separate median."""


def measure_leak(
    model: Any,
    collator: Any = None,
    mask_documents: bool = False,
    lengths: list[int] | None = None,
    budget: int | None = None,
    draw: Draw | None = None,
) -> float:
    """Return the largest gradient between packed samples, relative to those inside; 0.0 if none.

    mask_documents: pass the boundaries to the stock masks.
    lengths: of random samples.
    budget: of the pack; default: its tokens.
    draw: returns other samples, such as those with images.
    """
    collator = collator or PackedCollator()
    samples = draw(0) if draw else _samples(model, lengths or _short_row(collator))
    if len(samples) < 2:
        return 0.0  # a pack of one sequence cannot leak
    batch, owners = _batch(model, collator, samples, budget), _pixel_owners(samples)
    lengths = [len(sample) for sample in samples]
    with preserve_rng(), module_mode(model, training=True):
        return leaked_gradient(model, batch, lengths, mask_documents, owners)


def passes_gradients(
    model: Any, collator: Any, lengths: list[int], budget: int, mask_documents: bool = False
) -> bool:
    """Return whether some gradient passes between tokens of a sample: else no leak would show.

    The arguments are those of `measure_leak`.
    """
    if max(lengths) < 2:
        return True  # no sample has two tokens
    collator, samples = collator or PackedCollator(), _samples(model, lengths)
    batch = _batch(model, collator, samples, budget)
    with preserve_rng(), module_mode(model, training=True):
        return has_gradient_inside(model, batch, lengths, mask_documents)


def _pixel_owners(samples: list[Sample]) -> Tensor | None:
    """Return the sample that each image, or patch of one, of the pack belongs to."""
    numbers = [number for number, sample in enumerate(samples) if sample.images is not None]
    inputs = [samples[number].images.model_inputs() for number in numbers]
    counts = [len(each["pixel_values"][0 if NESTED in each else ...]) for each in inputs]
    return torch.tensor(numbers).repeat_interleave(torch.tensor(counts)) if counts else None


def _short_row(collator: Any) -> list[int]:
    """Return the lengths of a few samples, within the collator's fixed shapes."""
    max_samples, max_length = shape_limits(collator)
    return probe_rows(None, 32, max_length or 32, max_samples)[0][-1]


def shape_limits(collator: Any) -> tuple[int | None, int | None]:
    """Return the samples of a row and the tokens of a sample that a collator's shapes allow."""
    return getattr(collator, "fixed_sequences", None), getattr(collator, "max_length", None)


def measure_difference(
    model: Any,
    collator: Any,
    lengths: list[int],
    mask_documents: bool = False,
    budget: int | None = None,
    draw: Draw | None = None,
) -> float:
    """Return how far packed samples are from the samples alone; rounding counts as 0.0.

    draw: returns other samples than random ones of these lengths. The positions of samples with
    images alone are the model's own.

    The effect of rounding on this model is measured too. Rounding may send a token to other
    experts, which changes it a lot, but hardly in every row of random samples.
    """
    collator, excess = collator or PackedCollator(), 0.0
    draw = draw or partial(_samples, model, lengths)
    batch = _batch(model, collator, draw(0), budget)
    is_random = _is_random(model, batch, mask_documents)
    with preserve_rng(), module_mode(model, training=not is_random):
        for seed in range(_DRAWS):
            pairs = _differences(model, collator, draw(seed), mask_documents, budget)
            own = _beyond_noise(*map(list, zip(*pairs, strict=True)))
            excess = nan_max(gather_objects(own))  # ranks that share weights leave together
            if not excess:
                return 0.0
    return excess


def _differences(
    model: Any, collator: Any, samples: list[Sample], mask: bool, budget: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for the last samples, by token: packed against alone, and two roundings alone."""
    batch = _batch(model, collator, samples, budget)
    packed = _logits(model, batch, [len(ids) for ids in samples], mask)
    # The samples that only fill the row up to the last three are not run alone.
    for sample, together in list(zip(samples, packed, strict=True))[-3:]:
        batch = _batch(model, collator, [sample], budget)
        if sample.images is not None:
            inputs = sample.images.inputs_alone().items()
            batch = _to_device({name: torch.from_numpy(each) for name, each in inputs}, model)
        (alone,) = _logits(model, batch, [len(sample)], mask)
        if "pixel_values" in batch:
            batch["pixel_values"] = _perturb_by_one_rounding(batch["pixel_values"])[1]
        with embeddings_replaced(model, _perturb_by_one_rounding):
            (rounded,) = _logits(model, batch, [len(sample)], mask)
        yield _by_token(together, alone), _by_token(rounded, alone)


def _beyond_noise(differences: list[Tensor], noises: list[Tensor]) -> float:
    """Return the largest difference, or median of differences, beyond that of noise; 0.0 if none.

    A few tokens that differ show in the largest difference; many tokens also show if noise is large
    for a few.
    """
    pairs = [
        (_largest(by_sample), _largest_median(by_sample)) for by_sample in (differences, noises)
    ]
    beyond = [d for d, noise in zip(*pairs, strict=True) if not d <= _NOISE_FACTOR * noise]
    return beyond[0] if beyond else 0.0


def _largest(by_sample: list[Tensor]) -> float:
    return float(torch.cat(by_sample).max())


def _by_token(logits: Tensor, alone: Tensor) -> Tensor:
    return (logits - alone).abs().amax(-1) / alone.abs().max()


def _largest_median(by_sample: list[Tensor]) -> float:
    """Return the largest median of a sample's tokens and of all first tokens; NaN if one is."""
    starts = torch.cat([tokens[:_FIRST_TOKENS] for tokens in by_sample])
    groups = [starts, *(tokens for tokens in by_sample if len(tokens) >= _MIN_FOR_MEDIAN)]
    return float(torch.stack([group.median() for group in groups]).max())


def _perturb_by_one_rounding(embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings that are one rounding apart, up or down."""
    device = embedded.device
    generator = torch.Generator(device).manual_seed(0)
    up = torch.rand(embedded.shape, generator=generator, device=device) < 0.5
    step = _rounding(embedded)
    return embedded, embedded * torch.where(up, 1 + step, 1 - step).to(embedded.dtype)


def _rounding(embedded: Tensor) -> float:
    """Return the relative rounding error of the products that follow."""
    device, dtype = embedded.device.type, embedded.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    is_tf32 = device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return 2.0**-10 if dtype == torch.float32 and is_tf32 else torch.finfo(dtype).eps


def _is_random(model: Any, batch: dict[str, Any], mask: bool) -> bool:
    """Return whether training mode is random: dropout, noise of a router."""
    device = next(model.parameters()).device
    with preserve_rng(), module_mode(model, training=True):
        before = rng_states(device)
        probed_logits(model, batch, [1], mask)
        pairs = zip(before, rng_states(device), strict=True)
        return not all(torch.equal(a, b) for a, b in pairs)


def measure_shard_difference(model: Any, collator: Any, lengths: list[int]) -> float:
    """Return how far the losses of a row spread over ranks are from the whole row's.

    Rounding counts as 0.0. Call it on every rank of the group.
    """
    samples, loss = _samples(model, lengths), model.nopad_loss
    pack = Pack.of(samples, budget=sum(map(len, samples)))
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


def _samples(model: Any, lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    vocab_size = model.config.get_text_config().vocab_size
    return [Sample(rng.integers(0, vocab_size, length)) for length in lengths]


def image_samples(processor: Any, budget: int, seed: int = 0) -> list[Sample]:
    """Return samples of random letters: with an image, with two of other sizes, and without.

    budget: tokens that two or three of them together may have.
    """
    rng, samples = np.random.default_rng(seed), []
    for sizes in (((84, 140),), ((112, 56), (56, 84)), ()):
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        letters = ["".join(rng.choice(list("abcdefgh"), 9)) for _ in range(len(sizes) + 1)]
        samples.append(image_sample(processor, processor.image_token.join(letters), images))
    return samples if sum(map(len, samples)) <= budget else samples[::2]


def measure_images(model: Any, processor: Any, budget: int) -> tuple[float, float]:
    """Return the leak and the difference of samples with images, for a model with its processor.

    budget: tokens that the samples together may have.
    """
    draw = partial(image_samples, processor, budget)
    return measure_leak(model, draw=draw), measure_difference(model, None, [], draw=draw)


def _batch(model: Any, collator: Any, samples: list[Sample], budget: int | None) -> dict[str, Any]:
    """Return a batch without labels; collators of fixed shapes pad it to the budget."""
    tokens = sum(map(len, samples))
    budget = budget if budget and _can_pad(collator, len(samples), budget - tokens) else tokens
    pack = Pack.of(samples, budget)
    made = collator.unmasked(pack) if isinstance(collator, MaskedCollator) else collator(pack)
    batch = {k: v for k, v in made.items() if k not in ("labels", "loss_weights")}
    return _to_device(batch, model)


def _can_pad(collator: Any, samples: int, padding: int) -> bool:
    """Return whether a collator's fixed shapes leave place for a sequence of padding."""
    max_samples, max_length = shape_limits(collator)
    return samples < (max_samples or samples + 1) and padding <= (max_length or padding)


def _logits(model: Any, batch: dict[str, Any], lengths: list[int], mask: bool) -> list[Tensor]:
    """Return the logits at some places of each sample."""
    with torch.enable_grad():  # kernels are chosen by whether there will be a backward
        logits, counts = probed_logits(model, batch, lengths, mask)
    logits = logits.detach()
    # For a vocabulary that is masked in part: -inf differs from itself by NaN.
    is_masked = logits <= torch.finfo(logits.dtype).min
    return list(logits.float().masked_fill(is_masked, 0.0).split(counts))
