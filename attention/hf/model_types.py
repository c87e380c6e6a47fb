"""Types of models that `nopad` cannot serve, by class and config; refused at their first forward.

Such a model would ignore `attn_implementation` and run its own attention across documents. Most
types still request the mask registered for it, and the mask function of `nopad` refuses them.
Types without attention (Mamba, RWKV) request none: only our front ends and the doctor refuse them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..varlen import in_backward
from .forward_context import has_context

KEEPS_STATE = "keeps a recurrent or convolutional state beside attention ({})"
NO_INTERFACE = "does not use the attention interface of Transformers"
NO_POSITIONS = "takes no position_ids: its positions would not restart in a pack"
SELECTS_KEYS = "selects keys by an index, which needs an explicit mask"
_ONLY_UNPAGED = {
    "diffllama": "attends twice per layer under one layer index",
    "hrm_text": "runs its layers more than once per step",
    **dict.fromkeys(("zamba", "zamba2"), "calls one attention block for several layers"),
}
"""Right in packed rows, but not over pages."""
_UNSUPPORTED_TYPES = {
    "deepseek_v4": "keeps a compressed cache of its own",
    "inkling_text": "adds a position bias inside attention",
    "doge": "computes its mask from the values",
    "git": "chooses its attention from a table of its own",
}
_OFFSET_TYPES = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Types that count their positions from pad_token_id + 1."""
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "hybrid")


def config_reason(config: Any, paged: bool = True) -> str | None:
    """Return what a config says against `nopad`; None if nothing. paged: for generation as well."""
    config = config.get_text_config()
    model_type = config.model_type
    types = _UNSUPPORTED_TYPES | (_ONLY_UNPAGED if paged else {})
    if model_type in types:
        return f"{model_type} {types[model_type]}"
    if position_offset(config) and not has_context(config):
        return (
            f"{model_type} counts its positions from pad_token_id + 1, a packed batch counts from "
            "0; attach_loss(model) and the trainers add it"
        )
    if isinstance(getattr(config, "index_topk", None), int):
        return f"{model_type} {SELECTS_KEYS}"
    if getattr(config, "is_causal", True) is False:
        return f"{model_type} is configured as not causal"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return f"{model_type} attends in both directions (use_bidirectional_attention)"
    return None


def position_offset(config: Any) -> int:
    """Return the position of the first token of a document."""
    return config.pad_token_id + 1 if config.model_type in _OFFSET_TYPES else 0


def configured_state(config: Any) -> str | None:
    """Return the kind of layer of a config that keeps a recurrent or convolutional state."""
    types = (getattr(config, name, None) or () for name in ("layer_types", "layers_block_type"))
    return _stateful_type(*map(tuple, types))


def refuse_states(config: Any) -> None:
    """Raise for packs in a model with states beside attention, unless its loss resets them."""
    state = configured_state(config)
    if state is not None and not has_context(config) and not in_backward():
        raise ValueError(
            f"{config.model_type} keeps a recurrent or convolutional state beside attention "
            f"({state}), which would pass from one document to the next: train it with a trainer "
            "of nopad.trainer, or call nopad.trainer.loss.attach_loss(model) first"
        )


@cache
def _stateful_type(*layer_types: tuple[str, ...]) -> str | None:
    for layer_type in dict.fromkeys(chain(*layer_types)):
        if any(word in layer_type for word in _STATEFUL_LAYERS):
            return layer_type
    return None


@cache
def _class_reason(model_class: type, model_type: str) -> str | None:
    if not has_interface(model_class.__mro__):
        return f"{model_type} {NO_INTERFACE}"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return f"{model_type} {NO_POSITIONS}"
    return None


def has_interface(classes: Iterable[type]) -> bool:
    """Return whether a file that defines one of these classes uses the attention interface."""
    names = {each.__module__ for each in classes}
    files = [sys.modules[n] for n in names if ".modeling_" in n and ".models." in n]
    return not files or any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def is_vision(config: Any) -> bool:
    """Return whether a config is of a vision tower, whose rows are images and not packs."""
    return getattr(config, "base_config_key", None) == "vision_config"


def refuse_unsupported(config: Any) -> None:
    """Raise if `nopad` cannot serve text models of a config; the mask function calls it.

    Configs of other models, such as the vision tower of a model, are not judged.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return
    reason = config_reason(config, paged=False) or _class_reason(model_class, config.model_type)
    if reason is not None:
        raise ValueError(
            f'attn_implementation="nopad" cannot serve this model: {reason}; build it with '
            "another one, and see `nopad doctor` before packing"
        )
