"""How often does the start check refuse a right mixture of experts?

    python tests/trainer/support/false_alarms.py --seeds 200 --processes 2
    python tests/trainer/support/false_alarms.py --seeds 200 --processes 8 --device cuda

A trial is a model type, a precision and a seed of the random weights. Trials take turns, so that an
interrupted run has about as many of each cell. A line is printed for every refusal and, once a
minute, one with the number of trials of each precision; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

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
    config = tiny_config(CONFIG_MAPPING[kind](), layers)
    config.update(settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nopad")
    randomize_weights(model, seed)
    return model.to(DEVICE)


def data(budget: int = 256, longest: int = 200) -> PackedDataset:
    return PackedDataset([[5, 6, 7, 8]] * 20 + [[9] * longest], budget=budget)


def check(model, precision: str, budget: int = 256) -> None:
    """Run the start check in a precision; raise if it refuses the model."""
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    limit = sequence_limit(model.config.get_text_config())
    longest = budget * 3 // 4 if limit is None else min(budget * 3 // 4, limit.length)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "autocast"):
        check_run(model, data(budget, longest))


def run_trial(trial: tuple[str, str, int, str]) -> tuple[str, float]:
    """Return why a type with the weights of a seed is refused, "" if it is not, and the seconds."""
    global DEVICE
    kind, precision, seed, DEVICE = trial
    torch.set_num_threads(1)
    start, refusal = time.process_time(), ""
    try:
        check(build(kind, layers=4, seed=seed), precision, budget=96)
    except ValueError as error:
        refusal = f"{kind} in {precision}, seed {seed}: {error}"
    return refusal, time.process_time() - start


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seeds", type=int, default=200, help="of each type and precision")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--types", nargs="*", default=ALL_EXPERTS)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    cells = list(product(arguments.types, PRECISIONS))
    trials = [(*cell, seed, arguments.device) for seed in seeds for cell in cells]
    done, refused, cpu_seconds, printed = Counter(), Counter(), 0.0, time.monotonic()
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for trial, (refusal, seconds) in zip(trials, pool.map(run_trial, trials), strict=True):
            done[trial[1]] += 1
            refused[trial[1]] += bool(refusal)
            cpu_seconds += seconds
            if refusal:
                print(f"refused: {refusal}", flush=True)
            if time.monotonic() - printed > 60:
                printed = time.monotonic()
                print(f"trials {dict(done)}, {cpu_seconds:.0f} s of CPU", flush=True)
    figures = {"trials": done, "refused": refused, "cpu_seconds": round(cpu_seconds)}
    print(json.dumps({**figures, "device": arguments.device}))


if __name__ == "__main__":
    main()
