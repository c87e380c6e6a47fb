"""A tiny config of the same model type, with every layer type, and random weights for it."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

TINY: dict[str, Any] = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 64, "d_model": 64,
    "n_embd": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "dff": 96,
    "d_ff": 96, "feed_forward_size": 96, "intermediate_size_mlp": 96, "decoder_ffn_dim": 96,
    "mlp_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_ffn_hidden_size": 32, "prefix_dense_intermediate_size": 96,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "attention_head_dim": 16,
    "kv_channels": 16, "swa_head_dim": 16, "swa_v_head_dim": 16, "global_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_global_key_value_heads": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "rotary_dim": 8, "qk_head_dim": 24,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "moe_top_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "zero_expert_num": 1,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "max_seq_length": 256, "sliding_window": 4, "sliding_window_size": 4, "window_size": 4,
    "laurel_rank": 8, "num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attn_logit_softcapping": 5.0, "ngram_vocab_size_ratio": 2,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_expand": 1, "mamba_chunk_size": 8, "attention_chunk_size": 16, "index_topk": 8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
TINY_EVEN_IF_NONE = {
    "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts",
    "head_dim", "num_key_value_heads",
}  # fmt: skip
"""Set even if the type's default is None."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
ATTENTION_DROPOUTS = (
    "attention_dropout", "attn_pdrop", "attn_dropout", "attention_dropout_prob",
    "attention_probs_dropout_prob",
)  # fmt: skip
DROPOUTS = (
    *ATTENTION_DROPOUTS, "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout",
    "activation_dropout", "hidden_dropout_prob", "layerdrop", "embedding_dropout", "emb_pdrop",
    "resid_dropout", "residual_dropout", "mlp_dropout", "ffn_dropout", "classifier_dropout",
)  # fmt: skip


def tiny_config(config: Any, layers: int | None = None) -> Any:
    """Return a tiny config of the same class with every layer type of the given one."""
    changes = {name: value for name, value in TINY.items() if _has_value(config, name)}
    if "qk_rope_head_dim" in changes:  # such configs call the rotary part the head dim
        changes["head_dim"] = changes["qk_rope_head_dim"]
    changes |= {name: _zero(getattr(config, name)) for name in DROPOUTS if hasattr(config, name)}
    layer_types = getattr(config, "layer_types", None)
    pattern = list(dict.fromkeys(layer_types)) if layer_types else []
    count = layers or max(2, len(pattern))
    if pattern:
        changes["layer_types"] = (pattern * count)[:count]
    changes |= {name: count for name in LAYERS if isinstance(getattr(config, name, None), int)}
    if changes.get("num_key_value_heads") and config.num_key_value_heads == _num_heads(config):
        changes["num_key_value_heads"] = 4
    for name in ("mlp_layer_types", "block_types", "no_rope_layers"):
        values = getattr(config, name, None)
        if isinstance(values, list) and values:
            changes[name] = (list(dict.fromkeys(values)) * count)[:count]
    if isinstance(rope := getattr(config, "rope_parameters", None), dict) and "rope_type" in rope:
        changes["rope_parameters"] = _tiny_rope(rope, changes.get("head_dim") or 16)
    changes |= {name: tiny_config(inner, layers) for name, inner in _sub_configs(config)}
    if hasattr(config, "is_decoder"):
        changes["is_decoder"] = True
    if getattr(config, "use_sliding_window", None) is False:
        changes |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return _rebuild(config, changes)


def _tiny_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Shrink the original context, and the factors that longrope has for every frequency."""
    frequencies = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    tiny = {name: v[:frequencies] if isinstance(v, list) else v for name, v in rope.items()}
    if tiny.get("original_max_position_embeddings"):
        tiny["original_max_position_embeddings"] = TINY["original_max_position_embeddings"]
    return tiny


def _zero(rate: Any) -> float:
    """Return zero in the type of the given rate: strict configs distinguish 0 and 0.0."""
    return 0 if isinstance(rate, int) else 0.0


def _sub_configs(config: Any) -> list[tuple[str, Any]]:
    """Return the configs inside a config: of its text, vision and audio models."""
    named = [(name, getattr(config, name, None)) for name in getattr(config, "sub_configs", {})]
    return [(name, inner) for name, inner in named if isinstance(inner, PreTrainedConfig)]


def _has_value(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name) and (
            name in TINY_EVEN_IF_NONE or getattr(config, name) is not None
        )
    except Exception:  # some configs raise for values that differ by layer
        return False


def _num_heads(config: Any) -> int | None:
    return next(
        (getattr(config, n) for n in ("num_attention_heads", "n_head") if hasattr(config, n)), None
    )


def _rebuild(config: Any, changes: dict[str, Any]) -> Any:
    """Build a new config, so that values derived from sizes are derived again."""
    kept = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name in _KEPT and name not in changes
    }
    values = {name: value for name, value in (kept | changes).items() if _settable(config, name)}
    return type(config)(**copy.deepcopy(values))


def _settable(config: Any, name: str) -> bool:
    name = getattr(config, "attribute_map", {}).get(name, name)
    attribute = getattr(type(config), name, None)
    return not isinstance(attribute, property) or attribute.fset is not None


_KEPT = {
    "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "attention_bias", "tie_word_embeddings", "hidden_act", "hidden_activation", "use_qk_norm",
    "parallel_residual", "use_parallel_residual", "new_decoder_architecture", "multi_query",
    "alibi",
    "rope_parameters", "attention_chunk_size",
}  # fmt: skip


def randomize_weights(model: nn.Module, seed: int = 0) -> None:
    """Give every weight a sizable random value: errors are invisible with initial weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            if weight.ndim < 2:
                weight.add_(noise * (1.0 if "sink" in name else 0.1))
            else:
                inner = weight.shape[-1]
                weight.copy_(noise / math.sqrt(inner) * 1.5)
        embedding = model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
        embedding.copy_(torch.randn(embedding.shape, generator=generator))
