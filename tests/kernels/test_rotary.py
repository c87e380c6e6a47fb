"""Rotary embeddings against the Transformers function, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import apply_rotary, rotate_heads

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=[(4, 2, 32), (6, 3, 24), (1, 1, 128)], ids=str)
def inputs(request):
    heads, kv_heads, dim = request.param
    torch.manual_seed(dim)
    q = torch.randn(1, 5, heads, dim).transpose(1, 2)
    k = torch.randn(1, 5, kv_heads, dim).transpose(1, 2)
    angles = torch.randn(1, 5, dim)
    return q, k, angles.cos(), angles.sin()


def test_heads_are_rotated_as_the_model_rotates_them(inputs):
    assert_close(apply_rotary(*inputs), apply_rotary_pos_emb(*inputs))


def test_a_last_dimension_with_a_stride_is_read_right(inputs):
    q, k, cos, sin = inputs
    q, k = (x.mT.contiguous().mT for x in (q, k))
    assert q.stride(-1) != 1
    assert_close(apply_rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin))


def test_the_inverse_is_the_gradient_in_one_tensor(inputs):
    q, k, cos, sin = inputs
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    outs = apply_rotary_pos_emb(q, k, cos, sin)
    d_outs = [torch.randn_like(out) for out in outs]
    expected = torch.autograd.grad(outs, (q, k), d_outs)
    d_q, d_k = rotate_heads(*d_outs, cos, sin, inverse=True)
    assert_close((d_q.transpose(1, 2), d_k.transpose(1, 2)), expected)
    assert d_k.storage_offset() == d_q.storage_offset() + d_q[0, 0].numel()
    assert d_q.stride() == d_k.stride()
