"""Tiny models that a pack can go wrong with: each with limits that a few tokens exceed.

longrope, longrope_moe, dynamic   rotary frequencies that change beyond LIMIT tokens
chunked                           attention in chunks of LIMIT tokens
sparse                            at most LIMIT keys for a query
stateful                          a state beside attention
"""

from __future__ import annotations

import nopad.attention  # noqa: F401
import torch
from nopad.cli.tiny_model import randomize_weights
from transformers import AutoConfig, AutoModelForCausalLM

LIMIT = 16
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 8, "mamba_expand": 1, "mamba_chunk_size": 8,
}  # fmt: skip
KINDS = ("longrope", "longrope_moe", "dynamic", "chunked", "sparse", "stateful")


def odd_model(kind: str, attention: str = "eager", limit: int = LIMIT, **settings):
    """Build one of KINDS in evaluation mode."""
    model_type, own = _settings(kind, limit)
    config = AutoConfig.for_model(model_type, **SIZES | own | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize_weights(model)
    return model.eval()


def _settings(kind: str, limit: int) -> tuple[str, dict]:
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0,
        "original_max_position_embeddings": limit, "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 2 * i for i in range(8)], "short_mscale": 1.1, "long_mscale": 1.3,
    }  # fmt: skip
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    layer_types = ["chunked_attention", "full_attention"]
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16}
    index = {"index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4}
    return {
        "longrope": (
            "phi3", {"rope_parameters": longrope, "original_max_position_embeddings": limit},
        ),
        "longrope_moe": ("phimoe", {"rope_parameters": longrope, "num_local_experts": 4}),
        "dynamic": ("llama", {"rope_parameters": dynamic, "max_position_embeddings": limit}),
        "chunked": (
            "llama4_text", experts | {"attention_chunk_size": limit, "layer_types": layer_types},
        ),
        "sparse": ("deepseek_v32", MLA | index | {"index_topk": limit}),
        "stateful": ("falcon_h1", MAMBA | {"head_dim": 16}),
    }[kind]  # fmt: skip
