"""The attached loss: exact, without logits, and gone without a trace."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.trainer.cross_entropy import linear_cross_entropy
from nopad.trainer.loss import attach_loss


@pytest.fixture
def chunks_of_four_rows(monkeypatch):
    monkeypatch.setattr("nopad.trainer.cross_entropy.CHUNK_BYTES_CPU", 4 * 37 * 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.01)]
)
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    chunks_of_four_rows, smoothing, z_loss, bias
):
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    targets, weights = torch.randint(0, 37, (11,)), torch.rand(11)
    targets[3] = -100
    inputs = [x for x in (hidden, weight, shift) if x is not None]
    logits = torch.nn.functional.linear(hidden, weight, shift)
    losses = torch.nn.functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=smoothing
    )
    losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (targets != -100)
    gold = torch.autograd.grad(3 * (losses * weights).sum(), inputs)
    total, each = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=shift,
        token_weights=weights,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
    ours = torch.autograd.grad(3 * total, inputs)
    assert torch.allclose(each, losses.float(), atol=1e-5)
    for a, b in zip(ours, gold, strict=True):
        assert torch.allclose(a.double(), b, atol=2e-5)


def test_bf16_gradients_are_as_near_as_those_of_bf16_logits(chunks_of_four_rows):
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(37, 32)
    targets = torch.randint(0, 37, (64,))

    def gradients(hidden, weight, loss):
        inputs = [hidden.requires_grad_(), weight.requires_grad_()]
        return torch.autograd.grad(loss(*inputs) / 3, inputs)

    def stock(hidden, weight):
        return torch.nn.functional.cross_entropy(
            (hidden @ weight.T).float(), targets, reduction="sum"
        )

    gold = gradients(hidden.clone(), weight.clone(), stock)
    low = gradients(hidden.bfloat16(), weight.bfloat16(), stock)
    ours = gradients(
        hidden.bfloat16(), weight.bfloat16(), lambda h, w: linear_cross_entropy(h, w, targets)[0]
    )
    for a, b, c in zip(ours, low, gold, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_the_op_breaks_no_graph():
    weight = torch.randn(37, 8, requires_grad=True)
    targets = torch.randint(0, 37, (11,))
    hidden = torch.randn(11, 8, requires_grad=True)

    def loss(hidden):
        return linear_cross_entropy(2 * hidden, weight, targets)[0]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(hidden), hidden)
    (gold,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.equal(ours, gold)


def batch_of(data, **settings):
    return PackedCollator(**settings)(tiny_run.packs(data, 3))


@pytest.mark.parametrize("mean", ["token", "sample"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_step_equals_its_samples_one_by_one(mean, tied):
    model, data = tiny_run.model(tie_word_embeddings=tied), tiny_run.dataset()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(data, 3), mean)
    loss = attach_loss(model)
    assert loss.fused
    model(**batch_of(tiny_run.dataset(), mean=mean)).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


def test_a_special_head_keeps_its_logits_and_becomes_exact():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, attn_implementation="eager"))
    batch = batch_of(tiny_run.dataset())
    stock = model(**batch).loss
    loss = attach_loss(model)
    assert not loss.fused
    assert torch.allclose(model(**batch).loss, stock)
    counted = (batch["labels"] != -100).sum()
    assert torch.allclose(model(**batch, num_items_in_batch=7).loss, stock * counted / 7)


def test_without_labels_the_model_is_what_it_was():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    del batch["labels"]
    before = model(**batch).logits
    names = list(model.state_dict())
    loss = attach_loss(model)
    assert torch.equal(model(**batch).logits, before)
    assert list(model.state_dict()) == names
    loss.detach()
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    assert torch.equal(model(**batch).logits, before)


def test_token_losses_stand_at_their_labels():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    total = model(**batch, num_items_in_batch=1).loss
    assert loss.token_losses.shape == batch["labels"].shape
    assert torch.allclose(loss.token_losses.sum(), total)
    assert not loss.token_losses[batch["labels"] == -100].any()


def test_a_batch_that_counts_nothing_has_loss_zero_and_no_gradient():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    attach_loss(model)
    batch["labels"].fill_(-100)
    model(**batch).loss.backward()
    assert all(not p.grad.any() for p in model.parameters())
