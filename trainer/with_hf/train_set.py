"""The training set: packs of the user's, or plain data that is packed as the arguments say."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainingArguments

from ...packing import PackedDataset
from ..data.plain_data import pack_plain
from .arguments import default_of

HONOURED = ("eos_token", "chat_template_path", "max_length")
"""Arguments of SFTConfig that hold for plain data: TRL has changed the tokenizer before it is used,
and `max_length` is also limited by the model."""


def plain_settings(args: TrainingArguments, given: dict[str, Any], budget: Any) -> dict[str, Any]:
    """Return the settings of packs that the arguments ask for; take `formatting_func` of `given`.

    TRL's default of `max_length` counts as unset: samples are cut at the model's own limit only.
    """
    seed = getattr(args, "data_seed", None)
    settings: dict[str, Any] = {"budget": budget, "seed": args.seed if seed is None else seed}
    settings["shuffle"] = getattr(args, "train_sampling_strategy", None) != "sequential"
    settings["format"] = given.pop("formatting_func", None)
    settings["text_column"] = getattr(args, "dataset_text_field", "text")
    settings["pad_to_multiple_of"] = getattr(args, "pad_to_multiple_of", None) or 1
    max_length = getattr(args, "max_length", None)
    if max_length is not None and max_length != default_of(args, "max_length"):
        if max_length > budget:
            raise ValueError(
                f"max_length={max_length} is longer than a pack of budget={budget}: raise budget="
            )
        settings |= {"max_length": max_length, "overflow": "truncate"}
    return settings


def pack_training_set(
    data: Any, model: Any, processing_class: Any, settings: dict[str, Any]
) -> PackedDataset:
    """Pack plain data for a model; its text is tokenized by `processing_class`."""
    try:
        return pack_plain(data, model.config, tokenizer=processing_class, **settings)
    except ValueError as error:
        if processing_class is None and "pass tokenizer=" in str(error):
            raise ValueError(str(error).replace("tokenizer=", "processing_class=")) from None
        raise


def accepted_dataset(trainer: type, data: Any, args: Any) -> Any:
    """Return a data set that the trainer's __init__ accepts: TRL's takes its own type only."""
    modules = (sys.modules[base.__module__] for base in trainer.__mro__)
    trl: Any = next((m for m in modules if m.__name__.startswith("trl.")), None)
    if trl is None:
        return data
    if not hasattr(args, "dataset_kwargs"):
        raise ValueError(
            f"args is a {type(args).__name__}, but the trainer is TRL's: pass an SFTConfig"
        )
    # TRL checks what only its own packing and its own masks need.
    args.packing = args.padding_free = args.assistant_only_loss = False
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return trl.Dataset.from_dict({"input_ids": [[0, 1]]})
