"""What every benchmark's record begins with, how it is written, and the clock they share."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "transformers", "flash_attn", "liger_kernel", "lm_eval")


def head(benchmark: str) -> dict:
    """What was run, when and on what."""
    on_gpu = torch.cuda.is_available()
    threads = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if on_gpu else threads,
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write(record: dict, path: Path | None) -> None:
    """Keep a record in a file, if one is named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=float) + "\n")


def shared_folder() -> Path:
    """Where real data, traces and models lie, if they are there at all."""
    return Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[2] / "shared")


def timed(call) -> tuple[float, object]:
    """Seconds a call takes: by the wall on a GPU, of processor time on a CPU others may share."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    out = call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, out


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
