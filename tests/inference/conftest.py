"""Fixtures of the inference tests: tiny models, and an oracle instead of a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from nopad.cli.tiny_model import TINY
from nopad.inference.scheduling import speculation
from oracle import World, tokens_alone

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gpt_oss": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48},
    "olmo2": {},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3},
}


@pytest.fixture
def world():
    return World


@pytest.fixture
def expected():
    return tokens_alone


@pytest.fixture
def always(monkeypatch):
    """Drafts are used wherever there is one, whether they pay or not."""
    monkeypatch.setattr(speculation.StepTimes, "plain", lambda self, count: 1.0)
    monkeypatch.setattr(speculation.StepTimes, "drafted", lambda self, *_: [(64, 1.0)])


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real models and data; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[3] / "shared")
    if not folder.is_dir():
        pytest.skip(reason=f"no real data at {folder}; set NOPAD_SHARED")
    return folder


@pytest.fixture(scope="session")
def tiny():
    """Tiny random models by family, whose logits depend strongly on everything they read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models: dict[str, torch.nn.Module] = {}

    def build(family: str) -> torch.nn.Module:
        if family not in models:
            torch.manual_seed(len(family))
            config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
            models[family] = model.eval()
        return models[family]

    return build


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture
def small_delta_rules(monkeypatch):
    """Give the delta rules of tiny models two heads of 16: their kernels are interpreted."""
    for part in ("key", "value"):
        monkeypatch.setitem(TINY, f"linear_num_{part}_heads", 2)
        monkeypatch.setitem(TINY, f"linear_{part}_head_dim", 16)
