"""The fused kernels, interpreted on a CPU, against the modules they stand in for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("fused_child.py")


def test_fused_kernels_compute_what_the_modules_compute():
    pytest.importorskip("triton", reason="the kernels are Triton's")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(CHILD)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path.home(),
    )
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]
