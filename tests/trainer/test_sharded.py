"""FSDP2 on two CPU ranks: sharded parameters, the same gradient."""

from __future__ import annotations

from pathlib import Path

import tiny_run


def test_the_gradient_under_fsdp2_is_that_of_the_samples_one_by_one():
    for child in tiny_run.launch(Path(__file__).parent / "support" / "fsdp_child.py"):
        for case, (fused, let_go, distance) in child.items():
            assert fused and let_go and distance < 2e-6, (case, distance)
