"""Q, k and v as one operation: exactly what the three layers compute alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_run
import torch
from nopad.trainer.fused import fusion_patterns
from nopad.trainer.fused.class_swap import fused_subclass
from nopad.trainer.fused.fusion_patterns import AttentionPart
from nopad.trainer.fused.linear_group import linear_group
from nopad.trainer.fused.projection import merge_adjacent, product_dtype, read_projection
from torch import nn


def qkv_linear(x, layers):
    projections = [read_projection(layer) for layer in layers]
    return linear_group(x, projections, product_dtype(x, projections))


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
    ours, gold = qkv_linear(x, layers), [layer(x) for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(ours, gold, strict=True))
    if not any(p.requires_grad for n in used for p in layers[n].parameters()):
        return
    pairs = zip(*(gradients(outs, x, layers, used) for outs in (ours, gold)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_that_lie_side_by_side_are_one_matrix_and_others_are_not():
    joint, weights = torch.randn(5, 9), [torch.randn(n, 4) for n in (4, 2, 3)]
    slices = [joint[:, :4], joint[:, 4:6], joint[:, 6:]]
    cases = {
        1: slices,
        2: [*slices[:2], slices[2].clone()],
        3: [x.clone() for x in slices],
    }
    assert len(merge_adjacent([slices[1], slices[0]], [weights[1], weights[0]])) == 2, (
        "the other way round"
    )
    assert (
        len(merge_adjacent([joint[:, :5], joint[:, 4:6]], [torch.ones(5, 4), weights[1]])) == 2
    ), "over"
    assert len(merge_adjacent([joint[:2, :4], joint[2:4, 4:6]], weights[:2])) == 2, "other rows"
    gold = sum(a @ b for a, b in zip(slices, weights, strict=True))
    for count, grads in cases.items():
        pairs = merge_adjacent(grads, weights)
        assert len(pairs) == count
        torch.testing.assert_close(sum(a @ b for a, b in pairs), gold)
    (lone,) = merge_adjacent([None, slices[1], None], weights)
    assert torch.equal(lone[0], slices[1]) and lone[1] is weights[1]


def test_what_does_not_meet_the_loss_has_no_gradient(layers):
    x = torch.randn(2, 3, 6, requires_grad=True)
    qkv_linear(x, layers)[1].sum().backward()
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
    assert AttentionPart.matches(Attention())
    assert AttentionPart.verify(Attention(), None, cpu)
    assert not AttentionPart.verify(Attention(of=torch.tanh), None, cpu)
    assert not AttentionPart.verify(Attention(of=lambda x: 1 / 0), None, cpu)


def test_asked_for_something_else_a_layer_answers_as_ever(monkeypatch):
    monkeypatch.setattr(fusion_patterns, "can_run", lambda x: True)
    module, x = Attention(of=torch.tanh), torch.randn(1, 3, 6)
    gold = module(x, angles=2.0)
    module.__class__ = fused_subclass(Attention, AttentionPart.forward)
    torch.testing.assert_close(module(x, angles=2.0), gold)
    torch.testing.assert_close(module(hidden_states=x, angles=2.0), gold)
    module.k_proj.register_forward_hook(lambda layer, args, out: 2 * out)
    assert not torch.allclose(module(x, angles=2.0), gold), "the hook runs"


def test_after_a_failure_the_layers_are_their_own_again(monkeypatch):
    monkeypatch.setattr(fusion_patterns, "can_run", lambda x: True)
    module, x = Attention(of=lambda x: 1 / 0), torch.randn(1, 3, 6)
    module.__class__ = fused_subclass(Attention, AttentionPart.forward)
    with pytest.raises(ZeroDivisionError):
        module(x, angles=2.0)
    assert not any("forward" in vars(layer) for layer in module.children())


def test_two_threads_can_be_inside_one_attention_at_once(monkeypatch):
    monkeypatch.setattr(fusion_patterns, "can_run", lambda x: True)
    inside = threading.Barrier(2, timeout=120)

    def wait(x):
        inside.wait()
        return x

    module, inputs = Attention(of=wait), torch.randn(2, 1, 3, 6)
    expected = [
        module.q_proj(x) * module.k_proj(x) + 2.0 * module.v_proj(x) for x in inputs.unbind()
    ]
    module.__class__ = fused_subclass(Attention, AttentionPart.forward)
    with ThreadPoolExecutor(2) as threads:
        outs = list(threads.map(lambda x: module(x, angles=2.0), inputs.unbind()))
    assert all(map(torch.equal, outs, expected))
    assert not any("forward" in vars(layer) for layer in module.children())


def test_attributes_that_a_forward_sets_are_kept(monkeypatch):
    class Counting(Attention):
        calls = 0

        def forward(self, hidden_states, angles):
            self.calls += 1
            return super().forward(hidden_states, angles)

    monkeypatch.setattr(fusion_patterns, "can_run", lambda x: True)
    module, x = Counting(), torch.randn(1, 3, 6)
    module.__class__ = fused_subclass(Counting, AttentionPart.forward)
    for _ in range(2):
        module(x, angles=2.0)
    assert module.calls == 2 and type(module.q_proj) is nn.Linear


def test_gradients_of_a_model_are_what_they_were(monkeypatch):
    model, ids = tiny_run.model(), torch.randint(1, 61, (1, 9))

    def weights() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    gold = weights()
    monkeypatch.setattr(fusion_patterns, "can_run", lambda x: True)
    for module in model.modules():
        if AttentionPart.matches(module):
            module.__class__ = fused_subclass(type(module), AttentionPart.forward)
    for ours, theirs in zip(weights(), gold, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
