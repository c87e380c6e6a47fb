"""Transformers: `attn_implementation="nopad"`, which models are supported, and self-checks."""

from .call_log import expect_layers, testify
from .forward_context import carried, carry
from .interface import NAME, register
from .mask_patch import installed, keep_apart
from .model_support import evaluating, probe_layers, refuse, why_refused
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
    "carried",
    "carry",
    "check_default_cache",
    "check_packed",
    "check_paged",
    "draw_documents",
    "evaluating",
    "expect_layers",
    "installed",
    "keep_apart",
    "probe_layers",
    "refuse",
    "register",
    "testify",
    "why_refused",
]
