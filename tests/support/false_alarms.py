"""False alarms of the start check: right models of random weights that it refuses.

    python tests/support/false_alarms.py                                  # five types, 20 seeds
    python tests/support/false_alarms.py --types all --seeds 200 --processes 16
    python tests/support/false_alarms.py --seeds 200 --device cuda --processes 16

Every trial builds a tiny mixture of experts and checks it as a training would: in fp32, in bf16 and
in fp32 under bf16 autocast. None of them leaks, so each refusal is a false alarm.

Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import numpy as np
import torch
import transformers
from nopad import PackedDataset
from nopad.attention import unsupported_reason
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.collators import PackedCollator
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = ("olmoe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
PRECISIONS = ("fp32", "bf16", "autocast")
BUDGET = 512


def main() -> None:
    """Try all cells, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--types", nargs="+", default=TYPES, help="or all: every mixture of experts"
    )
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    args = parser.parse_args()
    types = args.types
    if types == ["all"]:
        types = sorted(filter(has_experts, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    cells = [*product(types, args.precisions, range(args.seeds), [args.device])]
    alarms: Counter[tuple[str, str]] = Counter()
    start, told = time.monotonic(), []
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for (kind, precision, seed, _), reason in zip(
            cells, pool.map(trial, cells, chunksize=5), strict=True
        ):
            if reason:
                alarms[kind, precision] += 1
                told.append(f"{kind}, {precision}, seed {seed}: {reason}")
                print(told[-1], flush=True)
    for kind in types:
        row = "  ".join(f"{alarms[kind, p]:>3} of {args.seeds} {p}" for p in args.precisions)
        print(f"{kind:24} {row}")
    settings = {**vars(args), "types": types, "trials": len(cells)}
    found = {"false_alarms": len(told), "seconds": round(time.monotonic() - start)}
    print(json.dumps({**settings, **found}))


def build(kind: str) -> torch.nn.Module:
    """Return a tiny model of a type, with every kind of layer that the type has."""
    return tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="nopad")[0]


def has_experts(kind: str) -> bool:
    """Return whether a type that packs can train has experts."""
    try:
        model = build(kind)
        if not any("expert" in name for name, _ in model.named_modules()):
            return False
        return unsupported_reason(model, states=True) is None
    except Exception:
        return False  # not built small


def trial(cell: tuple[str, str, int, str]) -> str:
    """Return why the start check refuses a model; "" if it does not."""
    kind, precision, seed, device = cell
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model = build(kind)
    randomize_weights(model, seed)
    model = model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).train()
    attach_loss(model)
    rng = np.random.default_rng(seed)
    vocabulary = model.config.get_text_config().vocab_size
    rows = [{"input_ids": rng.integers(3, vocabulary, 100).tolist()} for _ in range(8)]
    data = PackedDataset(rows, budget=BUDGET)
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "autocast")
    try:
        with autocast:
            check_run(model, data, PackedCollator())
    except ValueError as error:
        return str(error)[:200]
    return ""


if __name__ == "__main__":
    main()
