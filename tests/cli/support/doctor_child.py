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


def same_packs(**ranks) -> PackedDataset:
    """All ranks are dealt the packs of rank 0."""
    return build_data(**{"rank": 0, "world_size": 2, **ranks})


def other_weights(device):
    """The model of rank 1 has other weights."""
    model = build_model(device)
    with torch.no_grad():
        model.lm_head.weight += rank()
    return model


FAULTS = {
    "none": contextlib.nullcontext,
    "data": lambda: patch.object(doctor_distributed, "_dataset", same_packs),
    "weights": lambda: patch.object(doctor_distributed, "_model", other_weights),
    "count": lambda: patch.object(PackedLoader, "_items", lambda *_: 100.0),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for fault in sys.argv[1:]:
        out = io.StringIO()
        with FAULTS[fault](), contextlib.redirect_stdout(out):
            found[fault] = [main(["doctor", "--distributed"]), ""]
        found[fault][1] = out.getvalue()
    print(json.dumps(found))
