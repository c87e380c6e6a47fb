"""Attention of vision towers: all images of a pack in one call.

Towers like Qwen's know where each image, or window of one, begins. They pass that to attention
implementations with "flash" in their names only; for others they call once for each window.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..attend import attend
from ..varlen import Varlen
from .mask_patch import ATTN_IMPLEMENTATION
from .model_types import is_vision
from .state_pool import BOUNDARIES

IMAGES_IMPLEMENTATION = "nopad_flash"


def batch_images(model: nn.Module, before: str = ATTN_IMPLEMENTATION) -> list[Any]:
    """Let vision towers attend to all images in one call, if their attention is now `before`.

    Returns hooks: before Transformers 5.22, towers get the boundaries of the text as well.
    """
    AttentionInterface.register(IMAGES_IMPLEMENTATION, image_attention)
    towers = _rename(model, before, IMAGES_IMPLEMENTATION)
    return [m.register_forward_pre_hook(_without_text, with_kwargs=True) for m in towers]


def unbatch_images(model: nn.Module) -> None:
    """Give these towers nopad's other attention back."""
    _rename(model, IMAGES_IMPLEMENTATION, ATTN_IMPLEMENTATION)


def _rename(model: nn.Module, before: str, after: str) -> list[nn.Module]:
    """Rename the attention of towers that know the boundaries of images; return its modules."""
    found, configs = [], {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        is_tower = is_vision(config) and config._attn_implementation == before
        if is_tower and "cu_seqlens" in inspect.signature(module.forward).parameters:
            found.append(module)
            configs[id(config)] = config
    for config in configs.values():
        config._attn_implementation = after
    return found


def _without_text(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend inside each image, or each window of one: (1, H, T, D) in, (1, T, H, D) out."""
    if dropout:
        raise ValueError(f"attention dropout of {dropout} in a vision tower: set it to 0")
    varlen = Varlen(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    q, k, v = (x.to(value.dtype)[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, varlen, scale=scaling, causal=False)[None], None
