"""Unwrap a model from DDP, torch.compile and PEFT; refuse prompt tuning."""

from __future__ import annotations

from os import PathLike
from typing import Any


def unwrap_model(model: Any) -> Any:
    """Return the model inside DDP, torch.compile and PEFT wrappers; its layers keep adapters."""
    if isinstance(model, str | PathLike):
        name = str(model)
        raise ValueError(
            f"{name!r} is a name, not a model: pass AutoModelForCausalLM.from_pretrained({name!r})"
        )
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = unwrap_peft(model)
            inner = None if inner is model else inner
        if inner is None and not hasattr(model, "config"):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner


def unwrap_peft(model: Any) -> Any:
    """Return the model inside a PEFT wrapper; prompt and prefix tuning are refused."""
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        name = type(model.active_peft_config).__name__
        raise ValueError(
            f"{name} adds virtual tokens that the pack boundaries do not account for: use LoRA, "
            "or train and generate without nopad"
        )
    return model.get_base_model()
