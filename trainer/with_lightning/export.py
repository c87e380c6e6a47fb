"""Save a trained module for `from_pretrained`, which cannot load Lightning's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .hooks import is_trained, pretrained_models


def save_pretrained(trainer: Any, folder: Path | str, tokenizer: Any = None) -> None:
    """Save the causal LM of a trainer's module, or its adapter; call it on every rank.

    Args:
        trainer: the Lightning trainer, after `fit`.
        folder: folder that the first rank writes.
        tokenizer: a tokenizer to save with the model.
    """
    name, model = _pretrained(trainer.lightning_module)
    state = trainer.strategy.lightning_module_state_dict()
    if any(isinstance(weight, DTensor) for weight in state.values()):
        raise ValueError("the strategy gives shards of the weights: pass state_dict_type='full'")
    if not trainer.is_global_zero:
        return
    prefix = f"{name}." if name else ""
    weights = {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }
    model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _pretrained(module: nn.Module) -> tuple[str, Any]:
    """Find the model of Transformers or PEFT that a module trains, and its name there."""
    named = [(name, m) for name, m in module.named_modules() if hasattr(m, "save_pretrained")]
    if not named:
        raise ValueError(f"{type(module).__name__} has no model with save_pretrained")
    outermost = {id(model) for model in pretrained_models(module)}
    trained = [(name, m) for name, m in named if id(m) in outermost and is_trained(m)]
    if len(trained) > 1:
        names = ", ".join(name for name, _ in trained)
        raise ValueError(f"{names} are all trained: call save_pretrained of each of them instead")
    return (trained or named)[0]
