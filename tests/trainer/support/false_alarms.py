"""How often does the start check refuse a right mixture of experts?

    python tests/trainer/support/false_alarms.py --seeds 200 --processes 2
    python tests/trainer/support/false_alarms.py --processes 14 --device cuda --seconds 600

A trial is a model type, a precision and a seed of the random weights. Trials take turns, so that a
run that ends at its deadline has about as many of each cell. A line is printed for every refusal
and, once a minute, one with the number of trials of each precision; then come the trials of each
cell, and the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from nopad.attention.hf import sequence_limit
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.packing import PackedDataset
from nopad.trainer.monitoring import check_run
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

EXPERTS = ["olmoe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
_OTHER_EXPERTS = """
afmoe aria_text axk1 beam cohere2_moe deepseek_v2 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
glm4_moe_lite granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna
llama4_text longcat_flash mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text phimoe qwen2_moe
solar_open
"""
"""The other types of the zoo with experts; an older Transformers has fewer."""
ALL_EXPERTS = [kind for kind in (*EXPERTS, *_OTHER_EXPERTS.split()) if kind in CONFIG_MAPPING]
PRECISIONS = ["fp32", "bf16", "autocast"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(kind: str = "llama", layers: int = 2, seed: int = 0, **settings) -> nn.Module:
    model = _construct(kind, layers, **settings)
    randomize_weights(model, seed)
    return model.to(DEVICE)


def _construct(kind: str, layers: int, **settings) -> nn.Module:
    config = tiny_config(CONFIG_MAPPING[kind](), layers)
    config.update(settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="nopad")


def data(budget: int = 256, longest: int = 200) -> PackedDataset:
    return PackedDataset([[5, 6, 7, 8]] * 20 + [[9] * longest], budget=budget)


def check(model, precision: str, budget: int = 256) -> None:
    """Run the start check in a precision; raise if it refuses the model."""
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    limit = sequence_limit(model.config.get_text_config())
    longest = budget * 3 // 4 if limit is None else min(budget * 3 // 4, limit.length)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "autocast"):
        check_run(model, data(budget, longest))


@cache
def _models(kind: str, device: str) -> tuple[nn.Module, nn.Module, dict]:
    """Return a type's model in fp32 and in bf16, and the weights that it was built with."""
    torch.manual_seed(0)
    model = _construct(kind, layers=4).to(device)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return model, deepcopy(model).to(torch.bfloat16), initial


def _random_model(kind: str, precision: str, seed: int) -> nn.Module:
    """Return a type's model with the random weights of a seed; it is the same one every time."""
    model, low, initial = _models(kind, DEVICE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial[name])
        randomize_weights(model, seed)
        for lower, weight in zip(low.parameters(), model.parameters(), strict=True):
            lower.copy_(weight)
    return low if precision == "bf16" else model


def run_trial(trial: tuple[str, str, int, str]) -> tuple[str, float]:
    """Return why a type with the weights of a seed is refused, "" if it is not, and the seconds."""
    global DEVICE
    kind, precision, seed, DEVICE = trial
    torch.set_num_threads(1)
    start, refusal = time.process_time(), ""
    try:
        check(_random_model(kind, precision, seed), precision, budget=96)
    except ValueError as error:
        refusal = f"{kind} in {precision}, seed {seed}: {error}"
    return refusal, time.process_time() - start


def _run_until(deadline: float, trial: tuple[str, str, int, str]) -> tuple[str, float] | None:
    """Run a trial; None, once the deadline (by the clock) is over."""
    return run_trial(trial) if time.time() < deadline else None


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seeds", type=int, default=200, help="of each type and precision")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no trial starts later")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--types", nargs="*", default=ALL_EXPERTS)
    arguments = parser.parse_args()
    deadline, printed = time.time() + arguments.seconds, time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    cells: list[Any] = list(product(arguments.types, PRECISIONS))
    trials = [(*cell, seed, arguments.device) for seed in seeds for cell in cells]
    done, refused, cpu_seconds = Counter(dict.fromkeys(cells, 0)), Counter(), 0.0
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        results = pool.map(partial(_run_until, deadline), trials, chunksize=len(PRECISIONS))
        for trial, result in zip(trials, results, strict=True):
            if result is None:
                continue
            refusal, seconds = result
            done[trial[:2]] += 1
            refused[trial[:2]] += bool(refusal)
            cpu_seconds += seconds
            if refusal:
                print(f"refused: {refusal}", flush=True)
            if time.monotonic() - printed > 60:
                printed = time.monotonic()
                print(f"trials {_by_precision(done)}, {cpu_seconds:.0f} s of CPU", flush=True)
    for kind in arguments.types:
        print(f"{kind:22}", *(f"{name} {done[kind, name]:4}" for name in PRECISIONS), sep="  ")
    figures = {
        "trials": _by_precision(done),
        "refused": _by_precision(refused),
        "cells": len(done),
        "trials_per_cell": {"min": min(done.values()), "max": max(done.values())},
        "first_seed": arguments.first,
        "cpu_seconds": round(cpu_seconds),
        "device": arguments.device,
    }
    print(json.dumps(figures))


def _by_precision(cells: Counter) -> dict[str, int]:
    return {name: sum(cells[cell] for cell in cells if cell[1] == name) for name in PRECISIONS}


if __name__ == "__main__":
    main()
