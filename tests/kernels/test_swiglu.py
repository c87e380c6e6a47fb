"""SwiGLU against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import silu_mul

pytestmark = pytest.mark.usefixtures("interpreted")


def test_silu_of_the_gate_times_the_other_branch():
    gate, up = torch.randn(2, 1, 5, 300)
    assert_close(silu_mul(gate, up), silu(gate) * up)
    assert_close(silu_mul(gate.mT, up.mT), silu(gate.mT) * up.mT)
