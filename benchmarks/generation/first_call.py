"""(i) The first call of an engine in a new process: kernels not in Triton's cache, then in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import add_row

HERE = Path(__file__).resolve().parents[1]
CHILD = """
import json
from generation import workloads
from nopad.inference import Engine, SamplingParams
from record import timed

model = workloads.llama_1b()
params = SamplingParams(temperature=0, max_tokens=8)

def first_call():
    engine = Engine(model, memory=60 << 30)
    engine.generate([[1] * 64], params)
    return engine

seconds, engine = timed(first_call)
print(json.dumps({"seconds": seconds} | engine.stats.summary()))
"""


def run_first_call(name: str) -> None:
    """Time a call with an empty cache of compiled kernels, and one with what it has left."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        for cached in ("not cached", "cached"):
            command = [sys.executable, "-c", CHILD]
            child = subprocess.run(
                command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            result = json.loads(child.stdout.splitlines()[-1])
            add_row(
                name, f"nopad, kernels {cached}", result["seconds"], 8,
                setup_seconds=result["setup_seconds"], capture_seconds=result["capture_seconds"],
            )  # fmt: skip
