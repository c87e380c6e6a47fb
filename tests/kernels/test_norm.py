"""RMSNorm and its backward against the Transformers module."""

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
    rms_norm_backward,
    rms_norm_forward,
)
from nopad.kernels import norm as norm_kernels

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


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("with_residual_grad", [False, True])
def test_gradients_are_those_of_the_module(norm, with_delta, with_residual_grad, monkeypatch):
    monkeypatch.setattr(norm_kernels, "BACKWARD_PROGRAMS", 3)  # of several rows each
    x, delta, d_out, d_residual = torch.randn(4, 7, len(norm.weight))
    residual, out, rstd = rms_norm_forward(
        x, delta if with_delta else None, norm.weight, 1e-5, x.dtype
    )
    total = (x + delta if with_delta else x).requires_grad_()
    expected = norm(total)
    assert_close(residual, total.detach())
    assert_close(out, expected.detach())
    grads = torch.autograd.grad(expected, (total, norm.weight), d_out)
    for delta_dtype in (torch.float32, torch.float16):
        d_x, d_delta, d_weight = rms_norm_backward(
            d_out,
            d_residual if with_residual_grad else None,
            residual,
            norm.weight,
            rstd,
            True,
            delta_dtype,
        )
        assert torch.equal(d_delta, d_x.to(delta_dtype))
    assert_close(d_x, grads[0] + d_residual if with_residual_grad else grads[0])
    assert_close(d_weight, grads[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_and_generation_compute_the_same_bits(norm, dtype):
    x, delta = torch.randn(2, 7, len(norm.weight), dtype=dtype)
    weight = norm.weight.detach().to(dtype)
    normed = rms_norm_forward(x, None, weight, 1e-5, dtype)[1]
    assert torch.equal(rms_norm(x, weight, 1e-5), normed)
    trained = rms_norm_forward(x, delta, weight, 1e-5, dtype)[:2]
    for generated in (
        add_rms_norm(x, delta, weight, 1e-5),
        add_rms_norm_split_k(x, delta[None], weight, 1e-5, use_pdl=False),
    ):
        assert all(map(torch.equal, trained, generated))


def test_a_norm_is_rounded_once_to_the_dtype_that_reads_it(norm):
    x, weight = torch.randn(7, len(norm.weight)), norm.weight.detach()
    wide = rms_norm_forward(x, None, weight, 1e-5, torch.float32)[1]
    narrow = rms_norm_forward(x, None, weight, 1e-5, torch.float16)[1]
    assert torch.equal(narrow, wide.half())
    assert torch.equal(rms_norm(x, weight, 1e-5, torch.float16), narrow)
    assert rms_norm(x.half(), weight, 1e-5).dtype == torch.float32
