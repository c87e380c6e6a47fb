"""`nopad eval` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from test_harness import random_model, small_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = small_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def nopad(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nopad", "eval", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)


def test_help_is_quick_and_needs_no_torch():
    program = (
        "import sys\nfrom nopad.cli.evaluate import options\ntry:\n    options(['--help'])\n"
        "except SystemExit:\n    sys.exit('torch' in sys.modules or 'lm_eval' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "--tasks" in done.stdout


def test_a_checkpoint_is_evaluated_on_tasks_of_ones_own(checkpoint, tmp_path):
    from lm_tasks import write_tasks

    names = write_tasks(tmp_path, 6)
    found = tmp_path / "results" / "all.json"
    done = nopad(
        "--model", checkpoint, "--tasks", ",".join(names), "--include-path", tmp_path,
        "--limit", 3, "--device", "cpu", "--output", found,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|tiny_choice|" in done.stdout.replace(" ", "")
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert set(numbers) == set(names) and 0 <= numbers["tiny_choice"]["acc,none"] <= 1
    assert len(json.loads(found.read_text())["samples"]["tiny_write"]) == 3


def test_what_a_user_can_mend_is_one_line(checkpoint, tmp_path):
    missing = nopad("--model", tmp_path / "nothing", "--tasks", "x", "--device", "cpu")
    assert missing.returncode == 2 and missing.stderr.strip().splitlines()[-1].startswith(
        "nopad eval: --model"
    )
