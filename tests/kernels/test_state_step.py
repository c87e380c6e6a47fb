"""Steps on states in place, against the functions of Transformers on states that are gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import conv_step, delta_rule_step
from transformers.models.qwen3_next import modeling_qwen3_next

pytestmark = pytest.mark.usefixtures("interpreted")
ROWS = torch.tensor([4, 0, 2])


@pytest.mark.parametrize(("width", "taps"), [(4, 4), (3, 4), (2, 3), (5, 2)])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_convolution_is_that_of_transformers(width, taps, activation, with_bias):
    x, states, weight = torch.randn(3, 300), torch.randn(5, 300, width), torch.randn(300, taps)
    bias = torch.randn(300) if with_bias else None
    gathered, others = states[ROWS], states[[1, 3]]
    stock: Any = modeling_qwen3_next.causal_conv1d_update
    expected = stock(x[..., None], gathered, weight, bias, activation)
    out = conv_step(x.mT.contiguous().mT, states, ROWS, weight, bias, activation == "silu")
    assert_close(out, expected[..., 0])
    assert_close(states[ROWS], gathered, rtol=0, atol=0)
    assert torch.equal(states[[1, 3]], others)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_keys", "num_values"), [(16, 80), (24, 16)])
def test_a_delta_rule_is_that_of_transformers(normalize, num_keys, num_values):
    row = torch.randn(3, 1, 2 * (2 * num_keys + num_values))
    q, k, v = (
        x.unflatten(-1, (2, -1)) for x in row.split([2 * num_keys] * 2 + [2 * num_values], -1)
    )
    decay, beta = -torch.rand(3, 1, 2), torch.rand(3, 1, 2)
    states = torch.randn(5, 2, num_keys, num_values)
    stock: Any = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    expected, new = stock(
        q, k, v, decay, beta, initial_state=states[ROWS], output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )  # fmt: skip
    others = states[[1, 3]]
    inputs = (x[:, 0] for x in (q, k, v, decay, beta))
    out = delta_rule_step(*inputs, states, ROWS, normalize)
    assert_close(out, expected[:, 0])
    assert_close(states[ROWS], new)
    assert torch.equal(states[[1, 3]], others)


def test_states_may_be_narrower_than_inputs():
    """As under autocast, where convolutions keep their inputs in bf16."""
    x, states, weight = torch.randn(3, 8), torch.randn(5, 8, 4).bfloat16(), torch.randn(8, 4)
    gathered = states[ROWS]
    stock: Any = modeling_qwen3_next.causal_conv1d_update
    expected = stock(x[..., None], gathered, weight)
    assert_close(conv_step(x, states, ROWS, weight, None, False), expected[..., 0])
    assert_close(states[ROWS], gathered)  # the interpreter cuts bits off instead of rounding


def test_states_of_another_shape_are_refused():
    x, weight = torch.zeros(1, 4), torch.zeros(4, 4)
    with pytest.raises(ValueError, match="4 taps do not fit states"):
        conv_step(x, torch.zeros(2, 4, 2), ROWS[:1], weight, None, False)
    q, decay = torch.zeros(1, 2, 16), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="do not fit states"):
        delta_rule_step(q, q, q, decay, decay, torch.zeros(2, 2, 16, 8), ROWS[:1], True)
