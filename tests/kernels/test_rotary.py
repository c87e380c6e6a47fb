"""Rotary embeddings against the Transformers function."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import apply_rotary

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
