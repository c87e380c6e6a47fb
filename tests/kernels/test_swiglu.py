"""SwiGLU and its backward against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import TRAINING_BLOCK, silu_mul, silu_mul_backward

pytestmark = pytest.mark.usefixtures("interpreted")


def test_silu_of_the_gate_times_the_other_branch():
    gate, up = torch.randn(2, 1, 5, 300)
    assert_close(silu_mul(gate, up), silu(gate) * up)
    assert torch.equal(silu_mul(gate, up), silu_mul(gate, up, TRAINING_BLOCK))
    assert_close(silu_mul(gate.mT, up.mT), silu(gate.mT) * up.mT)


def test_gradients_and_the_recomputed_hidden_states():
    gate, up, d_hidden = torch.randn(3, 50, 300)
    hidden = silu(gate.requires_grad_()) * up.requires_grad_()
    grads = torch.autograd.grad(hidden, (gate, up), d_hidden)
    gate, up = gate.detach(), up.detach()
    assert_close(silu_mul_backward(gate, up, d_hidden), grads)
    assert torch.equal(d_hidden, silu_mul(gate, up)), "the bits of the forward"
