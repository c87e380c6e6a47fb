"""Sizes of known models: benchmarks build theirs with random weights, nothing is downloaded."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig


def _heads(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}


def _size(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA_1B = {**_size(2048, 8192, 16, 128256), **_heads(32, 8, 64), **TIED}
LLAMA_8B = {**_size(4096, 14336, 32, 128256), **_heads(32, 8, 128), **UNTIED}
QWEN2_1B = {**_size(1536, 8960, 28, 151936), **_heads(12, 2, 128), **TIED}
QWEN3_06B = {**_size(1024, 3072, 28, 151936), **_heads(16, 8, 128), **TIED}
QWEN3_4B = {**_size(2560, 9728, 36, 151936), **_heads(32, 8, 128), **TIED}
QWEN3_8B = {**_size(4096, 12288, 36, 151936), **_heads(32, 8, 128), **UNTIED}
GEMMA2_2B = {**_size(2304, 9216, 26, 256000), **_heads(8, 4, 256)}
GEMMA3_1B = {**_size(1152, 6912, 26, 262144), **_heads(4, 1, 256), "sliding_window": 512}
GEMMA3_4B = {**_size(2560, 10240, 34, 262208), **_heads(8, 4, 256), "sliding_window": 1024}
OLMO2_1B = {**_size(2048, 8192, 16, 100352), **_heads(16, 16, 128), **UNTIED}
GRANITE_2B = {
    **_size(2048, 8192, 40, 49159), **_heads(32, 8, 64), **TIED,
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
}  # fmt: skip
GRANITE_8B = {
    **_size(4096, 12800, 40, 49159), **_heads(32, 8, 128), **TIED,
    "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}  # fmt: skip
SMOLLM3_3B = {**_size(2048, 11008, 36, 128256), **_heads(16, 4, 128), **TIED}
MISTRAL_7B = {**_size(4096, 14336, 32, 32768), **_heads(32, 8, 128), "sliding_window": None}
PHI4_MINI = {**_size(3072, 8192, 32, 200064), **_heads(24, 8, 128), **TIED,
             "partial_rotary_factor": 0.75}  # fmt: skip
OLMOE = {**_size(2048, 1024, 6, 50304), **_heads(16, 16, 128), "num_experts": 64,
         "num_experts_per_tok": 8}  # fmt: skip
QWEN3_MOE = {**_size(2048, 6144, 6, 151936), **_heads(32, 4, 128), "num_experts": 128,
             "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # fmt: skip
MIXTRAL = {**_size(4096, 14336, 2, 32000), **_heads(32, 8, 128), "num_local_experts": 8,
           "num_experts_per_tok": 2}  # fmt: skip
DEEPSEEK_V3 = {
    **_size(2048, 5504, 6, 102400), "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {**_size(2880, 2880, 6, 201088), **_heads(64, 8, 64), "num_local_experts": 32,
           "num_experts_per_tok": 4, "sliding_window": 128}  # fmt: skip


def config_of(
    model_type: str, sizes: dict[str, Any], tiny: bool = False, positions: int = 16384
) -> Any:
    """Return a configuration of Transformers; tiny: small, for a CPU."""
    config = AutoConfig.for_model(model_type, **(_tiny(sizes) if tiny else sizes))
    config.max_position_embeddings = positions
    config.pad_token_id = None
    return config


def _tiny(sizes: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
             "num_local_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16}  # fmt: skip
    return {name: small.get(name, value) for name, value in sizes.items()}
