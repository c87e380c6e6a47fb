"""A model that cannot be fooled: its next token is a hash of the keys it reads.

No numerics are involved, so a single wrong slot, stale page or shifted position changes the tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from nopad.attention import PageAllocator
from nopad.inference.metrics.stats import Stats
from nopad.inference.requests.request import Request
from nopad.inference.requests.rng import splitmix64
from nopad.inference.scheduling.cache_checker import CacheChecker
from nopad.inference.scheduling.loop import Loop, StepOutput
from nopad.inference.scheduling.scheduler import Scheduler
from nopad.inference.scheduling.slot_params import SlotParams
from nopad.inference.scheduling.step import Step

VOCABULARY = 50
PLACES = splitmix64(np.arange(1, 1025, dtype=np.uint64))

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


def content(positions, tokens) -> np.ndarray:
    """What a slot holds once a token was written there."""
    return splitmix64(
        np.asarray(positions, np.uint64) * np.uint64(1009) + np.asarray(tokens, np.uint64)
    )


def follow(contents: np.ndarray, draw: float = 0.0) -> int:
    """The token that follows what was read, slot by slot."""
    total = splitmix64(contents ^ PLACES[: len(contents)]).sum(dtype=np.uint64)
    salt = np.uint64(int(draw * 2**40))
    return int(splitmix64(np.array([total ^ salt]))[0] % np.uint64(VOCABULARY))


class OracleRunner:
    """Runs steps on an array of slots instead of a model."""

    def __init__(self, num_pages: int, page_size: int, slots: int, depth: int, canary: bool = True):
        self.lookahead, self.page_size = depth, page_size
        self.kv = np.zeros((num_pages, page_size), np.uint64)
        self.newest = np.zeros(slots, np.int64)
        self.canary = CacheChecker(num_pages, page_size) if canary and depth == 0 else None
        self.scope = ""
        self.ran = 0

    def copy_pages(self, copies) -> None:
        self.kv[[c.target for c in copies]] = self.kv[[c.source for c in copies]]
        if self.canary:
            self.canary.copy(copies)

    def launch(self, step: Step):
        if self.canary:
            self.canary.check(step, self.scope)
        self.ran += len(step.ids)
        ids = np.where(step.ids < 0, self.newest[np.maximum(-1 - step.ids, 0)], step.ids)
        flat = self.kv.reshape(-1)
        flat[step.slots] = content(step.positions, ids)
        draws, heat = step.choice.uniform, step.choice.temperature
        tokens = []
        for i, row in enumerate(step.rows[: len(step.yielding)]):
            which = int(np.searchsorted(step.cu_seqlens, row, side="right")) - 1
            place = np.arange(step.lengths[which])
            read = flat[
                step.table[which, place // self.page_size] * self.page_size + place % self.page_size
            ]
            drawn = draws is not None and heat is not None and heat[i] > 0
            tokens.append(follow(read, float(draws[i]) if drawn else 0.0))
        self.newest[step.yield_slots] = tokens
        made = np.array(tokens, np.int64)
        return lambda: StepOutput(made)


class World:
    """Scheduler, loop and oracle over one small cache."""

    def __init__(
        self,
        num_pages,
        page_size,
        *,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        depth=0,
        canary=True,
        **more,
    ):
        self.columns = SlotParams(max_num_seqs)
        self.scheduler = Scheduler(
            PageAllocator(num_pages, page_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=1024,
            admit=self.columns.admit,
            **more,
        )
        self.runner = OracleRunner(num_pages, page_size, max_num_seqs, depth, canary)
        self.time = 0.0
        self.stats = Stats()
        self.loop = Loop(self.scheduler, self.runner, self.columns, self.stats, lambda: self.time)

    def step(self) -> list[Request]:
        self.time += 1
        news = self.loop.step()
        self.scheduler.check()
        return news

    def drain(self, bound: int) -> int:
        """Run to the end; the number of steps it took, at most `bound`."""
        steps = 0
        while self.loop.busy:
            assert steps < bound, f"not done after {bound} steps"
            self.step()
            steps += 1
        return steps


def alone(request: Request) -> list[int]:
    """The tokens the request would get if nothing else existed."""
    from nopad.inference.requests.rng import uniform

    tokens = request.prompt.tolist()
    made: list[int] = []
    while len(tokens) < request.limit:
        draw = 0.0
        if request.params.temperature:
            draw = float(uniform(np.array([request.seed]), np.array([len(tokens)]))[0])
        made.append(follow(content(np.arange(len(tokens)), tokens), draw))
        tokens.append(made[-1])
        if made[-1] in request.stop_ids:
            break
    return made


@pytest.fixture
def world():
    return World


@pytest.fixture
def expected():
    return alone


@pytest.fixture
def oracle_parts():
    return OracleRunner, content, follow


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

    made: dict[str, torch.nn.Module] = {}

    def build(family: str) -> torch.nn.Module:
        if family not in made:
            torch.manual_seed(len(family))
            config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
            made[family] = model.eval()
        return made[family]

    return build


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param
