"""`ensure_train_mode`: call `train()` on a model in eval mode, as `from_pretrained` returns it.

In eval mode dropout, LoRA's dropout and Transformers' gradient checkpointing are off. The HF
Trainer calls `train()` before every step; Lightning and Accelerate keep the mode they find.
"""

from __future__ import annotations

from torch import nn


def ensure_train_mode(model: nn.Module) -> None:
    """Call `train()` on a model that is in eval mode as a whole.

    A model in training mode stays unchanged, since parts of it may be in eval mode on purpose. A
    model without trainable parameters, such as a teacher, stays unchanged too.
    """
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if is_trained and not model.training:
        model.train()
