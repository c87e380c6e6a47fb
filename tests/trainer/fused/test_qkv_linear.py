"""Queries, keys and values as one operation: exactly what the three layers are apart."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.trainer.fused import attention_part
from nopad.trainer.fused.class_swap import fused_subclass
from nopad.trainer.fused.qkv_linear import _merged, joint_products
from torch import nn


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=bias) for width, bias in ((8, True), (4, False), (4, True))]


def gradients(outs, x, layers, used=(0, 1, 2)):
    wanted = [t for t in (x, *(p for n in used for p in layers[n].parameters())) if t.requires_grad]
    return torch.autograd.grad(sum(((n + 1) * outs[n]).sin().sum() for n in used), wanted)


@pytest.mark.parametrize("used", [(0, 1, 2), (2,), (0, 2)])
@pytest.mark.parametrize("frozen", [None, "x", 1])
def test_products_and_gradients_are_those_of_the_layers(layers, used, frozen):
    x = torch.randn(2, 3, 6, requires_grad=frozen != "x")
    if frozen == 1:
        layers[1].requires_grad_(False)
    ours, gold = joint_products(x, layers), [layer(x) for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(ours, gold, strict=True))
    if not any(p.requires_grad for n in used for p in layers[n].parameters()):
        return
    pairs = zip(*(gradients(outs, x, layers, used) for outs in (ours, gold)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_that_lie_side_by_side_are_one_matrix_and_others_are_not():
    both, weights = torch.randn(5, 9), [torch.randn(n, 4) for n in (4, 2, 3)]
    apart = [both[:, :4], both[:, 4:6], both[:, 6:]]
    cases = {
        1: apart,
        2: [*apart[:2], apart[2].clone()],
        3: [x.clone() for x in apart],
    }
    assert len(_merged([apart[1], apart[0]], [weights[1], weights[0]])) == 2, "the other way round"
    assert len(_merged([both[:, :5], both[:, 4:6]], [torch.ones(5, 4), weights[1]])) == 2, "over"
    assert len(_merged([both[:2, :4], both[2:4, 4:6]], weights[:2])) == 2, "other rows"
    gold = sum(a @ b for a, b in zip(apart, weights, strict=True))
    for count, given in cases.items():
        pairs = _merged(given, weights)
        assert len(pairs) == count
        torch.testing.assert_close(sum(a @ b for a, b in pairs), gold)
    (lone,) = _merged([None, apart[1], None], weights)
    assert torch.equal(lone[0], apart[1]) and lone[1] is weights[1]


def test_what_does_not_meet_the_loss_has_no_gradient(layers):
    x = torch.randn(2, 3, 6, requires_grad=True)
    joint_products(x, layers)[1].sum().backward()
    assert layers[0].weight.grad is None and layers[2].bias.grad is None
    assert layers[1].weight.grad is not None


class Attention(nn.Module):
    """Three products of what it is given, or of something else."""

    def __init__(self, of=lambda x: x):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 6) for _ in range(3))
        self.of = of

    def forward(self, hidden_states, angles):
        k = self.k_proj(self.of(hidden_states))
        return self.q_proj(hidden_states) * k + angles * self.v_proj(hidden_states)


def test_only_modules_that_ask_for_products_of_their_input_are_fused():
    cpu = torch.device("cpu")
    assert attention_part.matches(Attention())
    assert attention_part.agrees(Attention(), None, cpu)
    assert not attention_part.agrees(Attention(of=torch.tanh), None, cpu)
    assert not attention_part.agrees(Attention(of=lambda x: 1 / 0), None, cpu)


def test_asked_for_something_else_a_layer_answers_as_ever(monkeypatch):
    monkeypatch.setattr(attention_part, "serves", lambda x: True)
    part, x = Attention(of=torch.tanh), torch.randn(1, 3, 6)
    gold = part(x, angles=2.0)
    part.__class__ = fused_subclass(Attention, attention_part.forward)
    torch.testing.assert_close(part(x, angles=2.0), gold)
    torch.testing.assert_close(part(hidden_states=x, angles=2.0), gold)
    part.k_proj.register_forward_hook(lambda module, given, out: 2 * out)
    assert not torch.allclose(part(x, angles=2.0), gold), "the hook runs"


def test_after_a_failure_the_layers_are_their_own_again(monkeypatch):
    monkeypatch.setattr(attention_part, "serves", lambda x: True)
    part, x = Attention(of=lambda x: 1 / 0), torch.randn(1, 3, 6)
    part.__class__ = fused_subclass(Attention, attention_part.forward)
    with pytest.raises(ZeroDivisionError):
        part(x, angles=2.0)
    assert not any("forward" in vars(layer) for layer in part.children())


def test_two_threads_can_leave_a_layer_one_after_the_other():
    layers, answer = [nn.Linear(6, 6)], lambda x: x
    first, second = (attention_part._answering(layers, [answer]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert "forward" not in vars(layers[0])


def test_gradients_of_a_model_are_what_they_were(monkeypatch):
    model, ids = tiny_run.model(), torch.randint(1, 61, (1, 9))

    def weights() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    gold = weights()
    monkeypatch.setattr(attention_part, "serves", lambda x: True)
    for part in model.modules():
        if attention_part.matches(part):
            part.__class__ = fused_subclass(type(part), attention_part.forward)
    for ours, theirs in zip(weights(), gold, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
