"""One rank of `nopad doctor --distributed`, as it is and with faults; prints one line of JSON.

doctor_child.py FAULT...
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from unittest.mock import patch

import torch
from nopad.__main__ import main
from nopad.cli import doctor_distributed
from nopad.packing import PackedDataset
from nopad.runtime import rank
from nopad.trainer import PackedLoader

build_data, build_model = doctor_distributed._dataset, doctor_distributed._model


def same_packs(rank: int = 0, world: int = 2) -> PackedDataset:
    """All ranks are dealt the packs of rank 0."""
    return build_data(rank, world)


def other_weights(device):
    """The model of rank 1 has other weights."""
    model = build_model(device)
    with torch.no_grad():
        model.lm_head.weight *= 1 - 2 * rank()
    return model


def count_of_100():
    """Every step divides its loss by 100 tokens."""
    return patch.object(PackedLoader, "_items", lambda *_: 100.0)


FAULTS = {
    "none": (contextlib.nullcontext, set(doctor_distributed.CHECKS)),
    "data": (lambda: patch.object(doctor_distributed, "_dataset", same_packs), {"packs"}),
    "weights": (lambda: patch.object(doctor_distributed, "_model", other_weights), {"generation"}),
    "count": (count_of_100, {"DDP", "packs"}),
    "count in groups": (count_of_100, {"SP", "TP"}),
}
"""By name: how to put the fault in place, and the checks to run with it."""


def run(fault: str, device: torch.device) -> tuple[int, str]:
    """Return exit status and output of the command; the ranks have joined already."""
    context, checks = FAULTS[fault]
    chosen = {name: c for name, c in doctor_distributed.CHECKS.items() if name in checks}
    joined = patch.object(
        doctor_distributed, "_process_group", lambda: contextlib.nullcontext(device)
    )
    out = io.StringIO()
    with (
        context(),
        joined,
        patch.object(doctor_distributed, "CHECKS", chosen),
        contextlib.redirect_stdout(out),
    ):
        status = main(["doctor", "--distributed"])
    return status, out.getvalue()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with doctor_distributed._process_group() as device:
        found = {fault: run(fault, device) for fault in sys.argv[1:]}
    print(json.dumps(found))
