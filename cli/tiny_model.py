"""Build tiny random models with every kind of layer that a config, or a model type, can have.

Kinds of layers that cannot be built small are reported, because the check does not cover them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from .load_pretrained import short_error

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
    "num_key_value_heads": 2, "num_kv_heads": 2, "kv_n_heads": 2, "head_dim": 16,
    "attention_head_dim": 16, "kv_channels": 16, "swa_head_dim": 16, "swa_v_head_dim": 16,
    "global_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_global_key_value_heads": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "rotary_dim": 8, "qk_head_dim": 24,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "moe_top_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "zero_expert_num": 1,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "max_seq_length": 256, "sliding_window": 4, "sliding_window_size": 4, "window_size": 4,
    "laurel_rank": 8, "pad_token_id": 0, "bos_token_id": 1,
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
TINY_BY_TYPE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 50, "split_ngram_parts": 1,
        "eos_token_id": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Sizes of types whose sizes depend on each other."""
EVERY_KIND: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
        ]
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32
    },
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "mellum": {"mlp_layer_types": ["sparse", "dense"]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]
    },
    "zamba": {"layer_types": ["linear_attention", "hybrid"]},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "use_mem_rope": True},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"]},
}  # fmt: skip
"""Settings that give a type the kinds of layers it lacks by default, if they cannot be found in its
source."""
NOT_LAYERS = ("Norm", "Pooler", "Embedder", "FlashAttention2", "CrossAttention")
"""Parts of module names that do not count as kinds of layers: modules that do not mix tokens of a
text, and other names of attention implementations. Cross-attention reads an encoder's output, which
packs do not have."""
LAYER_COUNTS = (None, 8)
"""Numbers of layers to try until a tiny model has every kind; None: one layer for each kind."""
MAX_PARAMETERS = 50_000_000
"""A tiny model with more parameters is not tiny, and building it might fill the memory."""
SHARED_KV = "layers that share keys and values"
LAYER_TYPES = ("layer_types", "mlp_layer_types")
PATTERNS = (*LAYER_TYPES, "block_types", "no_rope_layers", "attention_layers")
"""Lists with an entry for each layer."""
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


def tiny_model(config: Any, every_kind: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """Build a tiny causal LM of a config; return it and the kinds of layers that it lacks.

    every_kind: include every kind the model type supports, not only those of this config.
    """
    wanted = None if every_kind else layer_kinds(_construct(config, options, "meta"))
    config = _with_every_kind(config) if every_kind else config
    found: list[tuple[Any, list[str]]] = []
    errors: list[Exception] = []
    for count in LAYER_COUNTS:
        try:
            model = _build(tiny_config(config, count), options)
        except Exception as error:  # sizes of a type may depend on each other in any way
            errors.append(error)
            continue
        kinds = possible_kinds(model) if wanted is None else wanted
        lacks = sorted(kinds - layer_kinds(model))
        found.append((model, lacks))
        if not lacks:
            break
    if not found:
        raise _cannot_shrink(errors[0])
    return min(found, key=lambda pair: len(pair[1]))


def _cannot_shrink(error: Exception) -> Exception:
    if isinstance(error, ValueError | OSError | ImportError):
        return error
    return ValueError(
        f"it cannot be made small ({short_error(error)}): pass the folder of a small checkpoint "
        "of that type"
    )


def _build(config: Any, options: dict[str, Any]) -> Any:
    """Build a model that runs; its size is checked first, without memory."""
    size = sum(p.numel() for p in _construct(config, options, "meta").parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"its tiny model has {size:,} parameters, more than {MAX_PARAMETERS:,}: pass the "
            "folder of a small checkpoint of that type"
        )
    model = _construct(config, options, "cpu").eval()
    randomize_weights(model)
    if torch.cuda.is_available():  # flash-linear-attention has no kernels for a CPU
        model = model.to("cuda")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]], device=model.device), use_cache=False)
    return model


def _construct(config: Any, options: dict[str, Any], device: str) -> Any:
    config = copy.deepcopy(config)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def layer_kinds(model: Any) -> set[str]:
    """Return the classes of a model's modules, and the layer types of its config."""
    names = {kind.__name__ for kind in _model_classes(model)}
    return names | _config_kinds(model.config.get_text_config())


def possible_kinds(model: Any) -> set[str]:
    """Return the kinds of layers that models of this type can have with other configs.

    They include the modules that the constructors of its modules name.
    """
    named = {each.__name__ for kind in _model_classes(model) for each in _named_modules(kind)}
    config = _with_every_kind(model.config.get_text_config())
    return layer_kinds(model) | named | _config_kinds(config)


def _config_kinds(config: Any) -> set[str]:
    kinds = {kind for name in LAYER_TYPES for kind in getattr(config, name, None) or ()}
    return kinds | ({SHARED_KV} if getattr(config, "num_kv_shared_layers", 0) else set())


def _with_every_kind(config: Any) -> Any:
    """Return a config with every kind of layer that its type supports, for `tiny_config`."""
    config = copy.deepcopy(config)
    for name, inner in _sub_configs(config):
        setattr(config, name, _with_every_kind(inner))
    for name, value in EVERY_KIND.get(config.model_type, {}).items():
        inner = getattr(config, name, None)
        inner.update(value) if isinstance(inner, PreTrainedConfig) else setattr(config, name, value)
    for name in LAYER_TYPES:
        if hasattr(config, name) and _settable(config, name):
            named = _named_layer_types(config, name)
            setattr(config, name, [*(getattr(config, name) or ()), *named])
    if getattr(config, "num_kv_shared_layers", None) is not None:
        config.num_kv_shared_layers = config.num_kv_shared_layers or 1
    return config


def _model_classes(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules that Transformers defines, with their bases."""
    bases = {base for module in model.modules() for base in type(module).__mro__}
    return {base for base in bases if _is_layer(base)}


def _named_modules(model_class: type) -> Iterator[type]:
    """Yield the classes of modules that a constructor names, also those it did not build."""
    constructor = vars(model_class).get("__init__")
    names = vars(sys.modules[model_class.__module__])
    for word in re.findall(r"\w+", inspect.getsource(constructor)) if constructor else ():
        value = names.get(word)
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, type) and issubclass(each, nn.Module) and _is_layer(each):
                yield each


def _is_layer(kind: type) -> bool:
    is_model = kind.__module__.startswith("transformers.models.")
    return is_model and not any(word in kind.__name__ for word in NOT_LAYERS)


def _named_layer_types(config: Any, name: str) -> list[str]:
    """Return the layer types that the source of a config and of its model names."""
    if name in EVERY_KIND.get(config.model_type, {}):
        return []
    module = type(config).__module__
    modules = (module, module.replace(".configuration_", ".modeling_"))
    source = "".join(inspect.getsource(importlib.import_module(each)) for each in modules)
    mlp = name == "mlp_layer_types"
    kinds = [kind for kind in ALLOWED_LAYER_TYPES if (kind in ("dense", "sparse")) == mlp]
    return [kind for kind in kinds if f'"{kind}"' in source]


def tiny_config(config: Any, layers: int | None = None, causal: bool = True) -> Any:
    """Return a tiny config of the same class with every layer type of the given one.

    causal: let tokens see only those before them, also in a type that is an encoder by default.
    """
    changes = {name: value for name, value in TINY.items() if _has_value(config, name)}
    if "qk_rope_head_dim" in changes:  # such configs call the rotary part the head dim
        changes["head_dim"] = changes["qk_rope_head_dim"]
    changes |= {name: _zero(getattr(config, name)) for name in DROPOUTS if hasattr(config, name)}
    heads = getattr(config, "num_attention_heads", getattr(config, "n_head", None))
    if changes.get("num_key_value_heads") and config.num_key_value_heads == heads:
        changes["num_key_value_heads"] = 4
    changes |= _tiny_layers(config, layers)
    if isinstance(rope := getattr(config, "rope_parameters", None), dict) and "rope_type" in rope:
        changes["rope_parameters"] = _tiny_rope(rope, changes.get("head_dim") or 16)
    changes |= {name: tiny_config(inner, layers, causal) for name, inner in _sub_configs(config)}
    if hasattr(config, "is_decoder"):
        changes["is_decoder"] = causal
    return _rebuild(config, changes | TINY_BY_TYPE.get(config.model_type, {}))


def _tiny_layers(config: Any, layers: int | None) -> dict[str, Any]:
    """Return the number of layers, and the lists that have an entry for each layer."""
    patterns: dict[str, list[Any]] = {}
    for name in PATTERNS:
        if isinstance(kinds := getattr(config, name, None), list | tuple) and kinds:
            patterns[name] = list(dict.fromkeys(kinds))
    count = layers or max([2, *map(len, patterns.values())])
    changes: dict[str, Any] = {}
    if (shared := getattr(config, "num_kv_shared_layers", None)) is not None:
        count = layers or (2 * count if shared else count)
        changes["num_kv_shared_layers"] = count // 2 if shared else 0
    changes |= {name: (kinds * count)[:count] for name, kinds in patterns.items()}
    if hasattr(config, "attention_types"):  # of gpt_neo, which derives its list from them
        changes["attention_types"] = [[[kind], 1] for kind in changes.pop("attention_layers")]
    changes |= {name: count for name in LAYERS if isinstance(getattr(config, name, None), int)}
    if any("sliding" in str(kind) for kind in patterns.get("layer_types", ())):
        windows = {"sliding_window": 4, "use_sliding_window": True}
        changes |= {name: value for name, value in windows.items() if hasattr(config, name)}
    return changes


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
    named = [(name, getattr(config, name, None)) for name in config.sub_configs]
    return [(name, inner) for name, inner in named if isinstance(inner, PreTrainedConfig)]


def _has_value(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name) and (
            name in TINY_EVEN_IF_NONE or getattr(config, name) is not None
        )
    except Exception:  # some configs raise for values that differ by layer
        return False


def _rebuild(config: Any, changes: dict[str, Any]) -> Any:
    """Build a new config, so that values derived from sizes are derived again."""
    kept = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name in _KEPT and name not in changes
    }
    aliases = config.attribute_map  # values under an alias are set last
    values = {
        aliases.get(name, name): value
        for name, value in (kept | changes).items()
        if _settable(config, name)
    }
    return type(config)(**copy.deepcopy(values))


def _settable(config: Any, name: str) -> bool:
    name = config.attribute_map.get(name, name)
    attribute = getattr(type(config), name, None)
    return not isinstance(attribute, property) or attribute.fset is not None


_KEPT = {
    "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "attention_bias", "tie_word_embeddings", "hidden_act", "hidden_activation", "use_qk_norm",
    "parallel_residual", "use_parallel_residual", "new_decoder_architecture", "multi_query",
    "alibi", "clip_qkv", "rope_theta", "rope_parameters", "attention_chunk_size", "ple_layer_ids",
    "attn_layer_indices", "attn_layer_period", "attn_layer_offset", "expert_layer_period",
    "expert_layer_offset", "decoder_sparse_step", "mlp_only_layers", "enable_moe_block", "is_moe",
    "position_embedding_type", "use_mem_rope",
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
