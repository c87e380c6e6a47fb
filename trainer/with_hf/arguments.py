"""Arguments of the HF Trainer and of TRL that packs replace: set as packs require, or refused.

A value that equals the library's default counts as unset. Every other value of an argument below
must match what packs do; otherwise it would have no effect and is refused, with advice. All other
arguments are read by the stock trainer and keep their meaning. Plain data is packed according to
them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from inspect import unwrap
from typing import Any

from transformers import TrainingArguments, training_args

from ...packing import PackedDataset
from ...packing.sources import TEXT_COLUMN

Accepts = Callable[[Any, PackedDataset], bool]


def _never(value: Any, data: PackedDataset) -> bool:
    return False


def _is_one(value: Any, data: PackedDataset) -> bool:
    return value == 1


TRAINING: dict[str, tuple[Accepts, str]] = {
    "per_device_train_batch_size": (
        _is_one, "a batch is one pack; set its size with PackedDataset(budget=)",
    ),
    "per_device_eval_batch_size": (
        _is_one, "a batch is one pack; set its size with the evaluation set's budget",
    ),
    "auto_find_batch_size": (
        _never, "a batch is one pack; lower the data's budget if memory runs out",
    ),
    "data_seed": (
        lambda value, data: value == data.settings["seed"],
        "the order of packs depends on PackedDataset(seed=)",
    ),
    "train_sampling_strategy": (
        lambda value, data: value == "sequential" and not data.settings["shuffle"],
        "the order of packs depends on PackedDataset(shuffle=, seed=)",
    ),
    "average_tokens_across_devices": (
        _never, "the loss is the exact token mean over all ranks",
    ),
    "label_names": (
        lambda value, data: list(value) == ["labels"], "the labels of packs are named 'labels'",
    ),
    "use_cache": (_never, "packed batches carry use_cache=False, which keeps documents apart"),
    "use_liger_kernel": (
        _never, "its loss would replace the exact one; nopad compiles the layers by default",
    ),
    "neftune_noise_alpha": (
        _never, "its noise is scaled by the length of a row, which here is that of a pack",
    ),
    "ignore_data_skip": (
        _never, "a checkpoint holds the position in the data, and nothing is skipped or repeated",
    ),
    "dataloader_drop_last": (
        _never, "an incomplete last step is completed with empty packs, so that no sample is lost",
    ),
    "dataloader_in_order": (_never, "the position in the data requires packs in their order"),
    "save_on_each_node": (
        _never, "the position in the data is saved once; use a folder that all nodes share",
    ),
    "enable_jit_checkpoint": (
        _never, "it saves in the middle of a step, whose packs would be lost; use StopCallback()",
    ),
}  # fmt: skip
"""Arguments of TrainingArguments: whether packs do what a value asks for, and advice if not."""

SFT: dict[str, tuple[Accepts, str]] = {
    "max_length": (
        lambda value, data: _keeps_length(value, data),
        "use PackedDataset(max_length=, overflow=) for long samples",
    ),
    "truncation_mode": (_never, "use PackedDataset(overflow=) for long samples"),
    "completion_only_loss": (
        lambda value, data: value is True and _all_rows(data, _is_completion),
        "PackedDataset trains on the completion of prompt/completion rows; for other choices "
        "pass rows with labels",
    ),
    "assistant_only_loss": (
        lambda value, data: _all_rows(data, _is_chat),
        "it applies to chats, and these rows are not chats",
    ),
    "dataset_text_field": (
        lambda value, data: value == data.settings["text_column"],
        "use PackedDataset(text_column=)",
    ),
    "dataset_kwargs": (
        lambda value, data: set(value) <= {"skip_prepare_dataset"},
        "PackedDataset prepares the data",
    ),
    "dataset_num_proc": (_never, "PackedDataset prepares the data; use dataloader_num_workers="),
    "chat_template_path": (_never, "set tokenizer.chat_template before you build PackedDataset"),
    "eos_token": (_never, "set tokenizer.eos_token before you build PackedDataset"),
    "shuffle_dataset": (
        lambda value, data: bool(data.settings["shuffle"]), "use PackedDataset(shuffle=True)",
    ),
    "packing_strategy": (_never, "use PackedDataset(strategy=, overflow=)"),
    "pad_to_multiple_of": (
        lambda value, data: (value or 1) == data.settings["pad_to_multiple_of"],
        "use PackedDataset(pad_to_multiple_of=)",
    ),
    "eval_packing": (lambda value, data: bool(value), "evaluation sets are packed too"),
    "loss_type": (
        lambda value, data: value == "chunked_nll",
        "packed training computes the exact mean of 'nll'",
    ),
}  # fmt: skip
"""The same for arguments of TRL's SFTConfig."""

TRAINER: dict[str, str] = {
    "formatting_func": "use PackedDataset(format=)",
}
"""Keyword arguments of trainers that would have no effect."""

ACCELERATOR: dict[str, tuple[Any, ...]] = {
    "split_batches": (False,),
    "dispatch_batches": (None, False),
    "even_batches": (True,),
    "non_blocking": (False,),
}
"""Keys of `accelerator_config` for the stock loader, and the values that packs accept."""

HONOURED = ("eos_token", "chat_template_path", "max_length")
"""Arguments of SFTConfig that hold for plain data: TRL has changed the tokenizer before it is used,
and `max_length` is also limited by the model."""


def adapt_arguments(args: TrainingArguments) -> float:
    """Set the arguments that packs require; return the label smoothing for the attached loss."""
    args.remove_unused_columns = False
    args.per_device_train_batch_size = 1  # a batch is one pack, and the trainer counts it as one
    args.per_device_eval_batch_size = 1
    args.ignore_data_skip = True  # the data state restores the position without replaying
    args.logging_nan_inf_filter = False  # it would log the loss of a diverged run as 0
    smoothing, args.label_smoothing_factor = args.label_smoothing_factor, 0.0
    return smoothing


def plain_settings(args: TrainingArguments, given: dict[str, Any], budget: Any) -> dict[str, Any]:
    """Return the settings of packs that the arguments ask for; take `formatting_func` of `given`.

    TRL's default of `max_length` counts as unset: samples are cut at the model's own limit only.
    """
    seed = args.seed if args.data_seed is None else args.data_seed
    settings: dict[str, Any] = {"budget": budget, "seed": seed}
    settings["shuffle"] = args.train_sampling_strategy != "sequential"
    settings["format"] = given.pop("formatting_func", None)
    settings["text_column"] = getattr(args, "dataset_text_field", TEXT_COLUMN)
    settings["pad_to_multiple_of"] = getattr(args, "pad_to_multiple_of", None) or 1
    max_length = getattr(args, "max_length", None)
    if max_length is not None and max_length != _default_of(args, "max_length"):
        if max_length > budget:
            raise ValueError(
                f"max_length={max_length} is longer than a pack of budget={budget}: raise budget="
            )
        settings |= {"max_length": max_length, "overflow": "truncate"}
    return settings


def weight_auxiliary_loss(args: TrainingArguments, model: Any) -> None:
    """Have the model weigh its auxiliary loss by the `router_aux_loss_coef` of TRL's arguments.

    TRL writes it to the config, for its own loss; the model has read its config before that.
    """
    coefficient = getattr(args, "router_aux_loss_coef", None)
    if coefficient is None:
        return
    if "router_aux_loss_coef" in unwrap(type(model).forward).__code__.co_names:
        model.config.get_text_config().output_router_logits = coefficient != 0
        model.router_aux_loss_coef = coefficient
    elif coefficient:
        raise ValueError(
            f"router_aux_loss_coef={coefficient}: the forward of {type(model).__name__} does not "
            "read it, so it would have no effect; omit it"
        )


def take_sequence_parallel(args: TrainingArguments, size: int) -> int:
    """Return the ranks that share a row; `sp_size` of the arguments becomes data parallelism.

    `accelerate launch` may set it too. The trainer would pass `sp_size` to DeepSpeed. For the
    trainer, the ranks of a group are data-parallel: gradients are averaged over them.
    """
    config: Any = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        # What `accelerate launch` has written to the environment; Accelerate itself is not a
        # library of this front end.
        from_environment: Any = vars(training_args)["ParallelismConfig"]
        config = from_environment()
    if config is None or config.sp_size == 1:
        return size
    if size not in (1, config.sp_size):
        raise ValueError(
            f"sequence_parallel={size}, but parallelism_config has sp_size={config.sp_size}: pass "
            "one of them"
        )
    grown = "dp_shard_size" if config.dp_shard_size > 1 else "dp_replicate_size"
    sizes = {"sp_size": 1, "sp_handler": None}
    if config.dp_shard_size * config.dp_replicate_size > 1:
        sizes[grown] = getattr(config, grown) * config.sp_size
    args.parallelism_config = dataclasses.replace(config, **sizes)
    return config.sp_size


def check_arguments(
    args: TrainingArguments,
    data: PackedDataset,
    given: dict[str, Any],
    honoured: Collection[str] = (),
) -> None:
    """Refuse arguments that would have no effect.

    given: the trainer's other keyword arguments.
    honoured: arguments that packs follow.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs would split packs (DataParallel): start one "
            "process per GPU with accelerate launch or torchrun, or make only one GPU visible"
        )
    names = {field.name for field in dataclasses.fields(args)}
    for name, (accepts, advice) in {**TRAINING, **SFT}.items():
        if name not in names or name in honoured:
            continue
        value = getattr(args, name)
        if value != _default_of(args, name) and not accepts(value, data):
            raise _refusal(name, value, advice)
    config: Any = args.accelerator_config
    for name, values in ACCELERATOR.items():
        if getattr(config, name, values[0]) not in values:
            raise _refusal(
                f"accelerator_config {name}", getattr(config, name), "each rank reads its own packs"
            )
    for name, advice in TRAINER.items():
        if given.get(name) is not None:
            raise _refusal(name, "…", advice)


def _default_of(args: TrainingArguments, name: str) -> Any:
    """Return the library's default of an argument."""
    return {field.name: field.default for field in dataclasses.fields(args)}.get(name)


def _refusal(name: str, value: Any, advice: str) -> ValueError:
    value = value if value == "…" else repr(value)
    return ValueError(f"{name}={value} does not apply to packs: {advice}; omit it")


def _keeps_length(max_length: int | None, data: PackedDataset) -> bool:
    """Return whether packs cut samples where TRL would, or no sample is that long."""
    overflow = data.settings["overflow"]
    if max_length is None:
        return overflow in ("split", "error")
    if max_length != (data.settings["max_length"] or data.settings["budget"]):
        return False
    fits = data.lengths is not None and int(data.lengths.max(initial=0)) <= max_length
    return fits or overflow in ("truncate", "error")


def _all_rows(data: PackedDataset, has_form: Callable[[Mapping], bool]) -> bool:
    """Return whether the first row of every source has a form; TRL checks only the first too."""
    rows = data.first_rows()
    return bool(rows) and all(isinstance(row, Mapping) and has_form(row) for row in rows)


def _is_chat(row: Mapping) -> bool:
    return "messages" in row or isinstance(row.get("completion"), list)


def _is_completion(row: Mapping) -> bool:
    return "prompt" in row and "completion" in row
