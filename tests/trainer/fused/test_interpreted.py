"""Fused operations and models with interpreted kernels: programs of the support folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm_python

SUPPORT = Path(__file__).parents[1] / "support"


WHOLE = pytest.param(["fused_models", "whole"], marks=pytest.mark.slow)


@pytest.mark.parametrize("program", [["fused_corners"], ["fused_models"], WHOLE])
def test_fused_operations_compute_what_pytorch_computes(program):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    name, *arguments = program
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = warm_python.run([SUPPORT / f"{name}.py", *arguments], env=environment, cwd=Path.home())
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]
