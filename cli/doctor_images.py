"""`nopad doctor` on vision-language models: packs with images against their documents one by one.

A checkpoint is checked with its own processor. A tiny model of a type has none, so that only the
start of a training run can check its images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..trainer.loss import attach_loss
from ..trainer.monitoring import measure_images
from .terminal import console, printable

BUDGET = 8192
"""Tokens that the samples of the check may have together."""


def image_class(config: Any) -> Any:
    """Return the class of a model of images and text, or None."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)


def has_processor(path: str) -> bool:
    """Return whether a folder has the processor of a model of images."""
    files = "processor_config.json", "preprocessor_config.json"
    return any((Path(path) / file).is_file() for file in files)


def report_images(name: str, kind: Any, path: str | None) -> int:
    """Print whether images are right in packs; return the exit status.

    path: of a checkpoint with its processor; None: there are no weights.
    """
    if path is None:
        advice = "pass the folder of a checkpoint with its processor"
        return _say(name, kind, f"not checked: {advice}", 2)
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
        options = {"dtype": torch.float32, "attn_implementation": "nopad"}
        model = kind.from_pretrained(path, **options)
        attach_loss(model)
        leak, difference = measure_images(model, processor, BUDGET)
    except (ValueError, OSError, ImportError) as error:  # refused with its reason
        return _say(name, kind, f"refused: {error}", 2)
    if leak or difference:
        return _say(name, kind, f"WRONG (leak {leak:.2g}, logits differ by {difference:.2g})", 1)
    return _say(name, kind, "right; train it on PackedDataset(tokenizer=processor)", 0)


def _say(name: str, kind: Any, verdict: str, status: int) -> int:
    line = f"{name}: {kind.__name__}, packs with images: {verdict}"
    console().print(printable(line), style="bold red" if status else None)
    return status
