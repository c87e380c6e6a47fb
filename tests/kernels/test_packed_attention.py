"""Packed attention with soft caps, windows and sinks: outputs and gradients of the reference."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from nopad.attention import Varlen
from nopad.attention.backends import triton_packed
from nopad.attention.backends.call_spec import ScoreParams
from nopad.attention.reference import reference

LENGTHS = [70, 1, 0, 33, 32]
"""More than two tiles of 32, one token, none, one tile and a token, one tile."""
PLAIN, CAPPED = {}, {"softcap": 1.5, "window": 20}


@pytest.mark.parametrize(
    ("rule", "heads", "kv_heads", "dim"),
    [
        (PLAIN, 2, 2, 16),
        (CAPPED, 2, 2, 24),
        (CAPPED, 4, 2, 16),
        ({"softcap": 2.0}, 2, 1, 16),
        ({"window": 3}, 2, 1, 16),
        ({"sinks": True, "softcap": 2.0}, 2, 1, 16),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_reference(interpreted, rule, heads, kv_heads, dim):
    torch.manual_seed(0)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim)]
    leaves = [torch.randn(sum(LENGTHS), *shape, requires_grad=True) for shape in shapes]
    if "sinks" in rule:
        rule = {**rule, "sinks": torch.randn(heads, requires_grad=True)}
        leaves.append(rule["sinks"])
    cu_seqlens = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    varlen = Varlen(cu_seqlens, max(LENGTHS))
    ours = triton_packed.packed(*leaves[:3], varlen, ScoreParams(0.4, **rule))
    gold = reference(*leaves[:3], varlen, scale=0.4, **rule)
    grad = torch.randn_like(gold)
    assert torch.allclose(ours, gold, atol=1e-5)
    pairs = zip(*(torch.autograd.grad(x, leaves, grad) for x in (ours, gold)), strict=True)
    for mine, right in pairs:
        assert torch.allclose(mine, right, atol=2e-5)
