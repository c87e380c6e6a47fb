"""The models and requests of bench_generation: known model shapes and published lengths.

Weights are random: speed does not depend on them, and nothing has to be downloaded. As in real use,
a request may end at any token, so the engine cannot rely on its length. Yet every request generates
a fixed number of tokens, so that all engines do the same work: the logit of `END_OF_TEXT` is 0, and
greedy decoding never chooses it.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass

import numpy as np
import torch
from record import shared_dir
from shapes import LLAMA_1B, LLAMA_8B, QWEN3_06B, config_of
from transformers import AutoModelForCausalLM, LlamaConfig

END_OF_TEXT = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the number of new tokens of each."""

    prompts: list[list[int]]
    new: list[int]

    @property
    def new_tokens(self) -> int:
        return sum(self.new)


def llama_1b(device: str = "cuda") -> torch.nn.Module:
    """The shape of Llama-3.2-1B."""
    return build_model(config_of("llama", LLAMA_1B, positions=8192), device)


def llama_8b(device: str = "cuda") -> torch.nn.Module:
    """The shape of Llama-3.1-8B."""
    return build_model(config_of("llama", LLAMA_8B, positions=8192), device)


def qwen3_600m(device: str = "cuda") -> torch.nn.Module:
    """The shape of Qwen3-0.6B."""
    return build_model(config_of("qwen3", QWEN3_06B, positions=8192), device)


def llama_cpu() -> torch.nn.Module:
    """A shape for a CPU: 4 layers, hidden size 256, 4 query and 2 KV heads, float32."""
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
    return build_model(config, "cpu", torch.float32)


def build_model(config, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Build a causal LM with random weights, of which none is ever in another precision."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.get_output_embeddings().weight.data[END_OF_TEXT] = 0
    model.generation_config.eos_token_id = END_OF_TEXT
    model.config.eos_token_id = END_OF_TEXT
    return model.eval()


def lognormal(vocab_size: int, count: int = 512, seed: int = 0) -> Workload:
    """(a) Log-normal lengths, median 220 in and 160 out, at most 1024."""
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(np.log(220), 1.0, count), 8, 1024).astype(int)
    new = np.clip(rng.lognormal(np.log(160), 1.0, count), 8, 1024).astype(int)
    return _random(rng, vocab_size, prompt, new)


def shaped(vocab_size: int, count: int = 256, seed: int = 0) -> Workload:
    """Log-normal lengths, mean 300 in and 200 out, sigma 0.8, then cut to 8 to 1024 tokens."""
    rng = np.random.default_rng(seed)
    prompt, new = (
        np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 8, 1024).astype(int)
        for mean in (300, 200)
    )
    return _random(rng, vocab_size, prompt, new)


def uniform(vocab_size: int, count: int = 256, seed: int = 0) -> Workload:
    """(b) In and out uniform in 100..1024, as in nano-vllm's benchmark."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, min(vocab_size, 10000)) for _ in range(rng.randint(100, 1024))]
        for _ in range(count)
    ]
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(count)])


def trace(vocab_size: int, count: int, shrink: int = 1, seed: int = 0) -> Workload | None:
    """(c) Requests of a real service, a random sample of Azure's code trace of 2023, in order.

    shrink: divides all lengths. None where the trace file is absent.
    """
    path = shared_dir() / "data" / "traces" / "AzureLLMInferenceTrace_code_2023.csv"
    if not path.exists():
        return None
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rng = np.random.default_rng(seed)
    rows = [rows[i] for i in np.sort(rng.choice(len(rows), count, replace=False))]
    prompt = np.maximum([int(r["ContextTokens"]) // shrink for r in rows], 1)
    new = np.maximum([int(r["GeneratedTokens"]) // shrink for r in rows], 1)
    return _random(rng, vocab_size, prompt, new)


def few_shot(vocab_size: int, count: int = 512, seed: int = 0) -> Workload:
    """(d) Prompts of 800 shared tokens (few-shot examples) and 60 of their own; 64 new tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab_size, 800).tolist()
    questions = [rng.integers(0, vocab_size, 60).tolist() for _ in range(count)]
    return Workload([shared + question for question in questions], [64] * count)


def choices(vocab_size: int, count: int = 256, seed: int = 0) -> tuple[list, list]:
    """(e) Contexts of 200 to 600 tokens with four continuations of 8 to 24 tokens each."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(0, vocab_size, rng.integers(200, 601)).tolist() for _ in range(count)]
    continuations = [
        [rng.integers(0, vocab_size, rng.integers(8, 25)).tolist() for _ in range(4)]
        for _ in range(count)
    ]
    return contexts, continuations


def _random(rng, vocab_size: int, prompt, new) -> Workload:
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in prompt]
    return Workload(prompts, [int(n) for n in new])
