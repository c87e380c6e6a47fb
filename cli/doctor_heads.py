"""`nopad doctor` on models with another head than a causal LM's: encoders and classifiers.

The model runs packed with attn_implementation="nopad" and the attached loss, and one by one with
eager attention; logits and gradients are compared, and a leak is measured without a tolerance.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.hf import (
    is_encoder,
    leaked_gradient,
    nan_max,
    packed_batch,
    random_documents,
)
from ..trainer.loss import attach_loss
from .terminal import console, printable
from .tiny_model import randomize_weights, tiny_config

TOLERANCE = 1e-3
TRAINING = {
    "masked": "train it with data_collator=MaskedCollator(tokenizer)",
    "token": "train it on PackedDataset(label_column=...), a list of classes for each row",
    "document": "train it on PackedDataset(label_column=...), one row of logits per document",
}


@dataclass(frozen=True)
class HeadReport:
    """How a model with another head computes a pack."""

    head: str
    leak: float
    logits: float
    gradients: float

    @property
    def is_right(self) -> bool:
        return self.leak == 0.0 and nan_max([self.logits, self.gradients]) <= TOLERANCE


def head_class(config: Any) -> Any:
    """Return the class of a model that is not a causal LM, by its config; None if it is one.

    Encoder-decoders have one too, which is refused as by the trainers.
    """
    import transformers

    named = (config.architectures or [""])[0]
    if named.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return getattr(transformers, named, None)
    if config.is_encoder_decoder and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.get_text_config()
    if named.endswith("ForCausalLM") or not is_encoder(text):
        return None
    return transformers.MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)


def load_head(kind: Any, config: Any, path: str | None) -> Any:
    """Load a model of a class from a folder or the hub; without a path, build a tiny one."""
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    if path is not None:
        return kind.from_pretrained(path, **options)
    config = tiny_config(config, causal=not is_encoder(config.get_text_config()))
    if config.pad_token_id is None:
        config.pad_token_id = 0
    model = kind._from_config(config, **options)
    randomize_weights(model)
    return model


def check_head(model: Any) -> HeadReport:
    """Compare a pack with its documents one by one."""
    packed = copy.deepcopy(model.eval()).eval()
    packed.set_attn_implementation("nopad")
    head, documents = attach_loss(packed).head, random_documents(model)
    batch = packed_batch(documents)
    logits = packed(**batch).logits
    alone = torch.cat([model(input_ids=ids).logits for ids in documents], int(head != "document"))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    gradients = [_gradients(m, out, weights) for m, out in ((packed, logits), (model, alone))]
    scale = nan_max(float(g.abs().max()) for g in gradients[1]) or 1.0
    pairs = zip(*gradients, strict=True)
    return HeadReport(
        head,
        leaked_gradient(packed, batch, [ids.shape[1] for ids in documents]),
        float((logits - alone).detach().abs().max() / alone.detach().abs().max()),
        nan_max(float((a - b).abs().max()) for a, b in pairs) / scale,
    )


def _gradients(model: Any, logits: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    loss, parameters = (logits * weights).sum(), list(model.parameters())
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def report_head(name: str, kind: Any, config: Any, path: str | None) -> int:
    """Print whether a model trains on packs as on its documents; return the exit status."""
    try:
        found = check_head(load_head(kind, config, path and str(Path(path))))
    except ValueError as error:  # refused with its reason
        console().print(printable(f"{name}: {kind.__name__}: refused: {error}"), style="bold red")
        return 2
    verdict = "right" if found.is_right else "WRONG"
    console().print(
        printable(
            f'{name}: {kind.__name__} on packs with attn_implementation="nopad": {verdict} '
            f"(leak {found.leak:.2g}, logits differ by {found.logits:.1g}, gradients by "
            f"{found.gradients:.1g}); {TRAINING[found.head]}"
        )
    )
    return int(not found.is_right)
