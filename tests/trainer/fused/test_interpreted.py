"""Fused operations and models with interpreted kernels: programs of the support folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("program", ["fused_corners", "fused_models"])
def test_fused_operations_compute_what_pytorch_computes(program):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    run = subprocess.run(
        [sys.executable, SUPPORT / f"{program}.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path.home(),
    )
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]
