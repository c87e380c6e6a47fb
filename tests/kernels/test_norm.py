"""RMSNorm against the Transformers module."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import (
    add_rms_norm,
    add_rms_norm_split_k,
    rms_norm,
)

pytestmark = pytest.mark.usefixtures("interpreted")
WIDTHS = (16, 96, 300)


@pytest.fixture(params=WIDTHS)
def norm(request):
    torch.manual_seed(request.param)
    norm = LlamaRMSNorm(request.param, eps=1e-5)
    norm.weight.data.normal_()
    return norm


def test_rows_and_strided_heads_are_normalized(norm):
    width = len(norm.weight)
    wide = torch.randn(1, 7, 5 * width)[..., : 3 * width].view(1, 7, 3, width)
    for x in (torch.randn(1, 7, width), wide, wide.transpose(1, 2)):
        assert_close(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())


def test_a_delta_is_added_first_in_the_wider_dtype(norm):
    x, delta = torch.randn(2, 7, len(norm.weight))
    for narrow in (x, x.half()):
        residual, out = add_rms_norm(narrow, delta, norm.weight.data, 1e-5)
        assert residual.dtype == torch.float32 and torch.equal(residual, narrow + delta)
        assert_close(out, norm(residual).detach())


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_partial_sums_are_added_first(norm, num_splits):
    width = len(norm.weight)
    x, partials = torch.randn(7, width), torch.randn(num_splits, 7, width)
    residual, out = add_rms_norm_split_k(x, partials, norm.weight.data, 1e-5, use_pdl=False)
    assert_close(residual, x + partials.sum(0))
    assert_close(out, norm(x + partials.sum(0)).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_delta_and_one_partial_sum_give_the_same_bits(norm, dtype):
    x, delta = torch.randn(2, 7, len(norm.weight), dtype=dtype)
    weight = norm.weight.detach().to(dtype)
    one = add_rms_norm(x, delta, weight, 1e-5)
    other = add_rms_norm_split_k(x, delta[None], weight, 1e-5, use_pdl=False)
    assert all(map(torch.equal, one, other))
    assert torch.equal(rms_norm(one[0], weight, 1e-5), one[1])


def test_a_norm_has_the_wider_dtype(norm):
    x, weight = torch.randn(7, len(norm.weight)), norm.weight.detach()
    assert rms_norm(x.half(), weight, 1e-5).dtype == torch.float32
