"""Pack the plain data that a trainer was given: with a budget, or like the training data.

    datasets.Dataset, list, path, stream ─▶ budget, the trainer's seed, the model's limit ─▶ packs

A `PackedDataset` is used unchanged, with its own settings.
"""

from __future__ import annotations

from typing import Any

from ...packing import PackedDataset
from .model_limits import length_limit

COMMON = (
    "budget",
    "overflow",
    "max_length",
    "pad_to_multiple_of",
    "pad_token_id",
    "continue_positions",
    "text_column",
    "on_error",
)
"""Settings of the training data that also apply to evaluation sets."""


def check_plain(data: Any, budget: int | None, name: str) -> bool:
    """Return whether data has to be packed; raise if `budget` is missing, or has no effect.

    name: the name of the argument, for messages.
    """
    if isinstance(data, PackedDataset):
        if budget is not None:
            raise ValueError(
                f"budget={budget} does not apply to a PackedDataset, whose budget is "
                f"{data.settings['budget']}: omit it"
            )
        return False
    if data is None:
        raise ValueError(f"{name} is missing: pass a data set and budget=, or a PackedDataset")
    if budget is None:
        raise ValueError(
            f"{name} is a {type(data).__name__}: pass budget=, the tokens of a pack, or wrap it in "
            "nopad.packing.PackedDataset"
        )
    return True


def refuse_plain_settings(**settings: Any) -> None:
    """Raise for a setting of plain data that would have no effect on a PackedDataset."""
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name}= is for plain data: pass it to the PackedDataset")


def pack_plain(data: Any, config: Any, *, budget: int, tokenizer: Any, **settings: Any):
    """Pack data for a model.

    config: the model's config, which limits the longest sequence; None if it is not known.
    tokenizer: for rows of text; rows of token ids need none.
    """
    limit = None if config is None else length_limit(config.get_text_config())
    if limit is not None and limit.length < budget:
        settings["max_length"] = min(limit.length, settings.get("max_length") or limit.length)
    return PackedDataset(data, budget=budget, tokenizer=text_tokenizer(tokenizer), **settings)


def pack_like(train: PackedDataset, source: Any, tokenizer: Any = None) -> PackedDataset:
    """Pack a source, in its order, with the settings of the training data.

    tokenizer: for rows of text; default: that of the training data.
    """
    if isinstance(source, PackedDataset):
        return source
    eos, encoder = train.settings["add_eos"], train.encoder
    return PackedDataset(
        source,
        tokenizer=encoder.processor or text_tokenizer(tokenizer) or encoder.tokenizer,
        format=None if _has_tokens(source) else encoder.format,
        add_eos=False if eos is None else eos,
        shuffle=False,
        pretokenize=True,
        rank=train.rank,
        world_size=train.world_size,
        cache_dir=train.cache_dir,  # pyright: ignore[reportArgumentType]
        # Predictions of documents are then in the order of the rows.
        strategy="sequential" if train.is_labelled else "best_fit",
        label_column=encoder.label_column,
        **{name: train.settings[name] for name in COMMON},
    )


def text_tokenizer(processing_class: Any) -> Any:
    """Return the tokenizer of a processor, or the tokenizer itself; None without one."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tokenizer if callable(tokenizer) else None


def _has_tokens(source: Any) -> bool:
    return "input_ids" in (getattr(source, "column_names", None) or ())
