"""What every front end is held against: a tiny model, uneven samples, the gold gradient."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import torch
from nopad.collators import PackedCollator
from nopad.packing import IGNORE_INDEX, PackedDataset

VOCABULARY = 61
BUDGET = 32


def samples(count: int = 40, seed: int = 0) -> list[dict]:
    """Samples of 2 to 20 tokens; of some, only few tokens count."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ids = rng.integers(1, VOCABULARY, rng.integers(2, 21))
        labels = ids.copy()
        if number % 3 == 0:
            labels[: len(ids) - 1] = IGNORE_INDEX
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def dataset(count: int = 40, **settings) -> PackedDataset:
    return PackedDataset(samples(count), **{"budget": BUDGET, "seed": 3, **settings})


def model(attention: str = "nopad", **settings):
    import nopad.attention  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
        **settings,
    )
    return LlamaForCausalLM(config)


def mixture(experts_implementation: str | None = None, **settings):
    """A mixture of experts with a large auxiliary loss; only eager experts compute in fp64."""
    import nopad.attention  # noqa: F401
    from transformers import AutoModelForCausalLM, OlmoeConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    ids = {"pad_token_id": 0, "eos_token_id": None, "max_position_embeddings": 64}
    config = OlmoeConfig(**sizes, **experts, **ids, **{"output_router_logits": True, **settings})
    how = {"experts_implementation": experts_implementation}
    return AutoModelForCausalLM.from_config(config, attn_implementation="nopad", **how)


def gold_mixture(model, packs: list) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, auxiliary loss and gradient of a step: what the stock model returns, by labels."""
    model.zero_grad()
    batches = [PackedCollator()(pack) for pack in packs]
    counts = [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches]
    total = aux = 0.0
    for batch, count in zip(batches, counts, strict=True):
        out = model(**batch)
        share = count / sum(counts)
        (share * out.loss).backward()
        total, aux = total + share * out.loss.item(), aux + share * out.aux_loss.item()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return total, aux, gradient


def packs(data: PackedDataset, count: int) -> list:
    """The first packs of the run, whoever makes them."""
    whole = dataset(len(samples()), rank=0, world_size=1) if data is None else data
    return [pack for pack, _ in zip(whole, range(count), strict=False)]


def batch_of(data: PackedDataset, **settings) -> dict:
    """The first three packs of a data set in one batch."""
    return PackedCollator(**settings)(packs(data, 3))


def collate(pack) -> dict:
    return PackedCollator()(pack)


def gold_loss(model, packs: list, mean: str = "token") -> torch.Tensor:
    """Run every sequence of the packs alone; the mean goes over all counted tokens (or samples)."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), device=device), 0.0
    for pack in packs:
        for a, b in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            ids, labels = (
                torch.from_numpy(x[a:b].copy())[None].to(device) for x in (pack.tokens, pack.labels)
            )
            counted = int((labels != IGNORE_INDEX).sum())
            if not counted:
                continue
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
            total = total + (loss if mean == "token" else loss / counted)
            count += counted if mean == "token" else 1
    return total / count


def gold_gradient(model, packs: list, mean: str = "token") -> dict[str, torch.Tensor]:
    model.zero_grad()
    gold_loss(model, packs, mean).backward()
    named = model.named_parameters()
    gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return gradient


def distance(ours: dict, gold: dict) -> float:
    """Largest difference of any gradient, relative to the largest gradient; NaN where one is."""
    scale = max(g.abs().max().item() for g in gold.values())
    differences = [(ours[name] - gold[name]).abs().max() for name in gold]
    return torch.stack(differences).max().item() / scale


def digest(model) -> str:
    """Say in one string what the weights are, to the bit."""
    state = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        state.update(name.replace("module.", "").encode())
        state.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def launch(script: Path, *arguments, world: int = 2, timeout: float = 300, check: bool = True):
    """Run a script as `world` processes; return the JSON in the last line of each."""
    import warm_python  # not there for the scripts, which import this module too

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        command = [script, *map(str, arguments)]
        pipe = subprocess.PIPE
        children.append(warm_python.Popen(command, env=env, stdout=pipe, stderr=pipe))
    return [_result(child, timeout, check) for child in children]


def _result(child, timeout: float, check: bool):
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{err[-3000:]}") from None
    if check:
        assert child.returncode == 0, err[-3000:]
        return json.loads(out.strip().splitlines()[-1])
    return child.returncode, out, err
