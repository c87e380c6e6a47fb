"""What fused operations do where few look: each corner is a function of `fused_corners.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_fused_operations_hold_in_their_corners():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    run = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "support" / "fused_corners.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]
