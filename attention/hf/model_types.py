"""Types of models that `nopad` cannot serve, by class and config; refused where a model is built.

Such a model would ignore the name and run its own attention across documents, or fail somewhere
inside: most of these types call nothing of ours in their first forward. So registering the name
with Transformers also wraps the method that accepts such names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from .mask_patch import ATTN_IMPLEMENTATION

KEEPS_STATE = "keeps a recurrent or convolutional state beside attention ({}), which is not paged"
NO_INTERFACE = "does not use the attention interface of Transformers"
NO_POSITIONS = "takes no position_ids: its positions would not restart in a pack"
SELECTS_KEYS = "selects keys by an index, which needs an explicit mask"
_ONLY_UNPAGED = {
    "diffllama": "attends twice per layer under one layer index",
    "hrm_text": "runs its layers more than once per step",
}
"""Right in packed rows, but not over pages."""
_UNSUPPORTED_TYPES = {
    "deepseek_v4": "keeps a compressed cache of its own",
    "inkling_text": "adds a position bias inside attention",
    "doge": "computes its mask from the values",
    "git": "chooses its attention from a table of its own",
} | dict.fromkeys(
    (
        "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
        "xlm-roberta-xl",
    ),
    "counts its positions from pad_token_id + 1, a packed batch counts from 0",
)  # fmt: skip
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "hybrid")
_TARGET = "get_correct_attn_implementation"


def config_reason(config: Any, paged: bool = True) -> str | None:
    """Return what a config says against `nopad`; None if nothing. paged: for generation as well."""
    config = config.get_text_config()
    model_type = getattr(config, "model_type", type(config).__name__)
    types = _UNSUPPORTED_TYPES | (_ONLY_UNPAGED if paged else {})
    if model_type in types:
        return f"{model_type} {types[model_type]}"
    for name in ("layer_types", "layers_block_type"):
        for layer_type in getattr(config, name, None) or ():
            if any(word in layer_type for word in _STATEFUL_LAYERS):
                return f"{model_type} " + KEEPS_STATE.format(layer_type)
    if isinstance(getattr(config, "index_topk", None), int):
        return f"{model_type} {SELECTS_KEYS}"
    if getattr(config, "is_causal", True) is False:
        return f"{model_type} is configured as not causal"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return f"{model_type} attends in both directions (use_bidirectional_attention)"
    return None


def class_reason(model_class: Any, config: Any) -> str | None:
    """Return why packed rows of a class that generates text cannot be attended to by `nopad`.

    Other classes, such as the vision tower of a model, are not judged.
    """
    if not model_class.can_generate():
        return None
    if (reason := config_reason(config, paged=False)) is not None:
        return reason
    if not getattr(config, "sub_configs", None) and not has_interface(model_class.__mro__):
        return f"{config.model_type} {NO_INTERFACE}"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return f"{config.model_type} {NO_POSITIONS}"
    return None


def has_interface(classes: Iterable[type]) -> bool:
    """Return whether a file that defines one of these classes uses the attention interface."""
    names = {each.__module__ for each in classes}
    files = [sys.modules[n] for n in names if ".modeling_" in n and ".models." in n]
    return not files or any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def install_name_guard() -> None:
    """Have Transformers refuse the name for models that cannot be served, once."""
    original = getattr(PreTrainedModel, _TARGET, None)
    if original is None or hasattr(original, "nopad_original"):
        return

    @wraps(original)
    def checked(self: Any, requested_attention: Any, *args: Any, **kwargs: Any) -> Any:
        if requested_attention == ATTN_IMPLEMENTATION:
            reason = class_reason(type(self), self.config)
            if reason is not None:
                raise ValueError(
                    f'attn_implementation="nopad" cannot serve this model: {reason}; build it with '
                    "another one, and see `nopad doctor` before packing"
                )
        return original(self, requested_attention, *args, **kwargs)

    checked.__dict__["nopad_original"] = original
    setattr(PreTrainedModel, _TARGET, checked)
