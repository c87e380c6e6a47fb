"""Triton kernels, shared by training and generation: tensors in, tensors out.

A name is loaded when it is first used, since Triton may be missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_tile import padded_dim
    from .cross_entropy import losses_and_gradient, scale_tensor
    from .fp8_gemm import fp8_grad_input, fp8_grad_weight, fp8_linear
    from .fused_decode import MAX_FUSED_SEQS, fused_decode_attention, fused_decode_tiles
    from .grouped_gemm import grouped_mm
    from .kv_write import write_kv
    from .launch import sm_count, supports_pdl
    from .norm import (
        add_rms_norm,
        add_rms_norm_split_k,
        rms_norm,
    )
    from .packed_attention import packed_attention, packed_attention_backward
    from .paged_decode import (
        MIN_SPLIT_KEYS,
        DecodeTiles,
        paged_attention_decode,
        programs_per_kv_head,
    )
    from .paged_prefill import PrefillTiles, paged_attention_prefill
    from .qkv_write import QKTransform, write_qkv
    from .rotary import apply_rotary
    from .skinny_gemm import (
        MAX_GEMM_ROWS,
        GemmTiles,
        gated_gemm,
        gated_gemm_tiles,
        gemm_tiles,
        split_k_gemm,
    )
    from .state_step import conv_step, delta_rule_step
    from .swiglu import silu_mul
    from .tokens import argmax, argmax_into, copy_words, embed, fill_last_tokens

__all__ = [
    "MAX_FUSED_SEQS",
    "MAX_GEMM_ROWS",
    "MIN_SPLIT_KEYS",
    "DecodeTiles",
    "GemmTiles",
    "PrefillTiles",
    "QKTransform",
    "add_rms_norm",
    "add_rms_norm_split_k",
    "apply_rotary",
    "argmax",
    "argmax_into",
    "conv_step",
    "copy_words",
    "delta_rule_step",
    "embed",
    "fill_last_tokens",
    "fp8_grad_input",
    "fp8_grad_weight",
    "fp8_linear",
    "fused_decode_attention",
    "fused_decode_tiles",
    "gated_gemm",
    "gated_gemm_tiles",
    "gemm_tiles",
    "grouped_mm",
    "losses_and_gradient",
    "packed_attention",
    "packed_attention_backward",
    "padded_dim",
    "paged_attention_decode",
    "paged_attention_prefill",
    "programs_per_kv_head",
    "rms_norm",
    "scale_tensor",
    "silu_mul",
    "sm_count",
    "split_k_gemm",
    "supports_pdl",
    "write_kv",
    "write_qkv",
]

_MODULES = {
    "attention_tile": ("padded_dim",),
    "cross_entropy": ("losses_and_gradient", "scale_tensor"),
    "fp8_gemm": ("fp8_grad_input", "fp8_grad_weight", "fp8_linear"),
    "fused_decode": ("MAX_FUSED_SEQS", "fused_decode_attention", "fused_decode_tiles"),
    "grouped_gemm": ("grouped_mm",),
    "kv_write": ("write_kv",),
    "launch": ("sm_count", "supports_pdl"),
    "norm": (
        "add_rms_norm",
        "add_rms_norm_split_k",
        "rms_norm",
    ),
    "packed_attention": ("packed_attention", "packed_attention_backward"),
    "paged_decode": (
        "MIN_SPLIT_KEYS",
        "DecodeTiles",
        "paged_attention_decode",
        "programs_per_kv_head",
    ),
    "paged_prefill": ("PrefillTiles", "paged_attention_prefill"),
    "qkv_write": ("QKTransform", "write_qkv"),
    "rotary": ("apply_rotary",),
    "skinny_gemm": (
        "MAX_GEMM_ROWS",
        "GemmTiles",
        "gated_gemm",
        "gated_gemm_tiles",
        "gemm_tiles",
        "split_k_gemm",
    ),
    "state_step": ("conv_step", "delta_rule_step"),
    "swiglu": ("silu_mul",),
    "tokens": ("argmax", "argmax_into", "copy_words", "embed", "fill_last_tokens"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
