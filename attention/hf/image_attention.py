"""`ImageAttention`: all images of a pack, isolated, in one `attend` call per vision-tower layer.

    patches  ▒▒▒▒▒▒|▒▒|▒▒▒▒    boundaries of images, or of the windows in them

Towers that know these boundaries pass them on only to attention with "flash" in its name; any other
is called for every image or window alone, hundreds of times in each layer.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..attend import attend
from ..varlen import Varlen
from .interface import flat_heads
from .mask_patch import ATTN_IMPLEMENTATION
from .model_types import is_vision
from .state_pool import BOUNDARIES

IMAGE_ATTENTION = "nopad_flash"
"""The name of `image_attention` in Transformers."""


class ImageAttention:
    """Attention of the vision towers of a model over all images at once, until `remove`."""

    def __init__(self, model: nn.Module):
        AttentionInterface.register(IMAGE_ATTENTION, image_attention)
        modules = [m for m in model.modules() if _knows_images(m)]
        # Before Transformers 5.22, towers get the boundaries of the text as well.
        self._hooks = [
            m.register_forward_pre_hook(_without_text, with_kwargs=True) for m in modules
        ]
        self._configs: list[Any] = [module.config for module in modules]
        for config in self._configs:
            config._attn_implementation = IMAGE_ATTENTION

    def remove(self) -> None:
        """Restore the towers' own way."""
        for hook in self._hooks:
            hook.remove()
        for config in self._configs:
            if config._attn_implementation == IMAGE_ATTENTION:
                config._attn_implementation = ATTN_IMPLEMENTATION


def _knows_images(module: nn.Module) -> bool:
    """Return whether a module is attention of a tower that knows the boundaries of images."""
    config: Any = getattr(module, "config", None)
    is_tower = is_vision(config) and config._attn_implementation == ATTN_IMPLEMENTATION
    return is_tower and "cu_seqlens" in signature(module.forward).parameters


def _without_text(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend through Transformers' attention interface: (1, H, T, D) in, (1, T, H, D) out."""
    if dropout:
        raise ValueError(f"attention dropout of {dropout} in a vision tower: set it to 0")
    varlen = Varlen(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    out = attend(*flat_heads(query, key, value), varlen, scale=scaling, causal=False)
    return out[None], None
