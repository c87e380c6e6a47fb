"""torchrun restarts the workers of a recipe after one was killed, and the run goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import small_inputs
from safetensors.torch import load_file

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain.py"
STEPS = 60
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3",
    "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
    "--rdzv-conf=last_call_timeout=1",
]  # fmt: skip


def start(folder: Path, name: str) -> subprocess.Popen:
    arguments = ["--data", small_inputs.documents(folder), "--budget", "128", "--steps", STEPS,
                 small_inputs.model(folder), "--save-every", "5", "--warmup", "2",
                 "--tokenizer", small_inputs.tokenizer(folder), "--eval-every", "100",
                 "--output", name]  # fmt: skip
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [*TORCHRUN, RECIPE, *arguments]
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=env)


def kill_rank(launcher: subprocess.Popen, rank: int) -> None:
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            child.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no worker has rank {rank}")


def logged(folder: Path) -> list[tuple[int, float]]:
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while not any(done >= step for done, _ in logged(folder)):
        assert launcher.poll() is None, "the run ended before a worker could be killed"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_goes_on_by_itself_after_each_rank_was_killed_once(tmp_path):
    whole = start(tmp_path, "whole")
    assert whole.wait(250) == 0
    launcher = start(tmp_path, "killed")
    for rank, step in ((1, 8), (0, 23)):
        wait_for_step(tmp_path / "killed", step, launcher)
        kill_rank(launcher, rank)
        time.sleep(1)  # the log is cut back to the checkpoint when the workers are there again
    assert launcher.wait(250) == 0
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    assert [step for step, _ in logged(tmp_path / "killed")] == list(range(1, STEPS + 1))
    last = f"checkpoint-{STEPS}/model.safetensors"
    weights, expected = (load_file(tmp_path / name / last) for name in ("killed", "whole"))
    assert all((weights[name] == expected[name]).all() for name in expected)
