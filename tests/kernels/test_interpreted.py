"""Tests that need interpreted kernels, in a child process where this one has compiled ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernels_pass_their_tests_interpreted(needs_child):
    if not needs_child:
        pytest.skip(reason="the tests of this folder are interpreted already")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).parent],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stdout[-3000:]
