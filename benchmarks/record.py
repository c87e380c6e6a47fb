"""The header of every benchmark record, the file it is written to, and a shared timer."""

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


def header(benchmark: str) -> dict:
    """Return what was run, when, and on which device and versions."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": _command(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write_record(record: dict, path: Path | None) -> None:
    """Write a record as JSON, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=float) + "\n")


def shared_dir() -> Path:
    """Return the directory of real data, traces and models, which need not exist."""
    return Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[2] / "shared")


def timed(call) -> tuple[float, object]:
    """Return the seconds that a call takes, and its result.

    Wall-clock time on a GPU; process time on a CPU, which other processes may share.
    """
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    result = call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, result


def _command() -> str:
    """Return the command line, without the file that the record goes to."""
    words = ["python", *sys.argv]
    if "--record" in words:
        place = words.index("--record")
        del words[place : place + 2]
    return " ".join(words)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
