"""Products of few rows against PyTorch, however they are tiled."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import GemmTiles, gated_gemm, split_k_gemm

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=[5, 16, 40])
def operands(request):
    torch.manual_seed(request.param)
    left, right = torch.randn(2, 200, 128) / 10
    return torch.randn(request.param, 128), left, right


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_partial_sums_add_up_to_the_product(operands, num_splits):
    x, weight, _ = operands
    partials = split_k_gemm(x, weight, GemmTiles(16, 64, 32, num_splits), use_pdl=False)
    assert partials.shape == (num_splits, len(x), 200)
    assert_close(partials.sum(0), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_gated_product_is_silu_of_one_times_the_other(operands):
    x, gate, up = operands
    out = gated_gemm(x, gate, up, GemmTiles(16, 64, 32, 1), use_pdl=False)
    assert_close(out, silu(x @ gate.T) * (x @ up.T), rtol=1e-4, atol=1e-4)
