"""The models and requests of bench_generation: shapes people know, lengths they publish.

Weights are random: speed does not depend on them, and nothing has to be downloaded. Every request
runs to its given length, so that all engines do the same work.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import torch
from record import shared_folder
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how many new tokens each gets."""

    prompts: list[list[int]]
    new: list[int]
    arrivals: list[float] | None = None

    @property
    def new_tokens(self) -> int:
        return sum(self.new)


def llama_1b(device: str = "cuda") -> torch.nn.Module:
    """The shape of Llama-3.2-1B."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    )
    return _build(LlamaForCausalLM, config, device, torch.bfloat16)


def qwen3_600m(device: str = "cuda") -> torch.nn.Module:
    """The shape of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    )
    return _build(Qwen3ForCausalLM, config, device, torch.bfloat16)


def llama_cpu() -> torch.nn.Module:
    """Four layers of width 256, for a CPU: 4 heads on 2, vocabulary 4096, float32."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return _build(LlamaForCausalLM, config, "cpu", torch.float32)


def _build(kind, config, device: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config).to(dtype)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model.eval()


def lognormal(vocabulary: int, count: int = 512, seed: int = 0) -> Work:
    """(a) Lognormal lengths, median 220 in and 160 out, at most 1024."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(np.log(220), 1.0, count), 8, 1024).astype(int)
    new = np.clip(rng.lognormal(np.log(160), 1.0, count), 8, 1024).astype(int)
    return _random(rng, vocabulary, prompt, new)


def uniform(vocabulary: int, count: int = 256, seed: int = 0) -> Work:
    """(b) In and out uniform in 100..1024, drawn as nano-vllm's benchmark draws them."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, min(vocabulary, 10000)) for _ in range(rng.randint(100, 1024))]
        for _ in range(count)
    ]
    return Work(prompts, [rng.randint(100, 1024) for _ in range(count)])


def trace(vocabulary: int, count: int, shrink: int = 1, seed: int = 0) -> Work | None:
    """(c) Requests of a real service, Azure's code trace of 2023: a random sample, in order."""
    path = shared_folder() / "data" / "traces" / "AzureLLMInferenceTrace_code_2023.csv"
    if not path.exists():
        return None
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rng = np.random.default_rng(seed)
    rows = [rows[i] for i in np.sort(rng.choice(len(rows), count, replace=False))]
    prompt = np.maximum([int(r["ContextTokens"]) // shrink for r in rows], 1)
    new = np.maximum([int(r["GeneratedTokens"]) // shrink for r in rows], 1)
    times = [datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp() for r in rows]
    work = _random(rng, vocabulary, prompt, new)
    return Work(work.prompts, work.new, [t - times[0] for t in times])


def few_shot(vocabulary: int, count: int = 512, seed: int = 0) -> Work:
    """(d) Prompts that share 800 tokens of examples; 60 of their own, 64 new."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, 800).tolist()
    own = [rng.integers(0, vocabulary, 60).tolist() for _ in range(count)]
    return Work([shared + o for o in own], [64] * count)


def choices(vocabulary: int, count: int = 256, seed: int = 0) -> tuple[list, list]:
    """(e) Contexts of 200 to 600 tokens with four continuations of 8 to 24 tokens each."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(0, vocabulary, rng.integers(200, 601)).tolist() for _ in range(count)]
    ends = [
        [rng.integers(0, vocabulary, rng.integers(8, 25)).tolist() for _ in range(4)]
        for _ in range(count)
    ]
    return contexts, ends


def _random(rng, vocabulary: int, prompt, new) -> Work:
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in prompt]
    return Work(prompts, [int(n) for n in new])


def floor_seconds(model, work: Work, bandwidth: float, matrix_rate: float) -> float:
    """The least time the work can take: all requests side by side, nothing but what must be moved.

    Prefill multiplies at the matrix rate; each decode step reads the weights once and the keys and
    values of whoever still runs.
    """
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = next(model.parameters()).element_size()
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * width * itemsize
    prompt = np.array([len(p) for p in work.prompts], dtype=float)
    new = np.array(work.new, dtype=float)
    body = parameters - config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * width
    prefill = (2 * body * prompt + attention * prompt**2).sum() / matrix_rate
    keys = ((prompt + new / 2) * new).sum() * kv
    return prefill + (new.max() * parameters * itemsize + keys) / bandwidth
