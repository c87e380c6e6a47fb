"""Tests that need interpreted kernels, in a child process where this one has compiled ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm_python


def test_the_kernels_pass_their_tests_interpreted(needs_child):
    if not needs_child:
        pytest.skip(reason="the tests of this folder are interpreted already")
    run = warm_python.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).parent],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stdout[-3000:]
