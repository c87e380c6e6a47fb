"""Transformers: `attn_implementation="nopad"`, which models are supported, and self-checks."""

from .call_log import check_every_layer, record_call
from .forward_context import current_varlen, forward_context
from .interface import NAME, register
from .mask_patch import document_mask, installed
from .model_support import check_supported, eval_mode, layer_shapes, unsupported_reason
from .selfcheck import (
    Packed,
    batch_of,
    check_default_cache,
    check_packed,
    check_paged,
    draw_documents,
)

__all__ = [
    "NAME",
    "Packed",
    "batch_of",
    "check_default_cache",
    "check_every_layer",
    "check_packed",
    "check_paged",
    "check_supported",
    "current_varlen",
    "document_mask",
    "draw_documents",
    "eval_mode",
    "forward_context",
    "installed",
    "layer_shapes",
    "record_call",
    "register",
    "unsupported_reason",
]
