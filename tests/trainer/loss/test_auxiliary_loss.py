"""The auxiliary loss of a mixture of experts: the mean over the label tokens of a step."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from front_ends import FIRST_STEP, lightning
from lightning.pytorch.callbacks import LambdaCallback
from nopad.collators import PackedCollator
from nopad.packing import Pack
from nopad.trainer import compile_layers
from nopad.trainer.loss import attach_loss
from trl_run import trl_trainer

ACCUMULATION = 3


@pytest.fixture(scope="module")
def gold():
    """Loss, auxiliary loss and gradient of the first step."""
    packs = tiny_run.packs(tiny_run.dataset(), ACCUMULATION)
    assert len({int((pack.labels != -100).sum()) for pack in packs}) > 1
    return tiny_run.gold_mixture(tiny_run.mixture(), packs)


@pytest.mark.parametrize("front_end", FIRST_STEP)
def test_every_front_end_has_the_gradient_of_the_mean_over_labels(front_end, gold, tmp_path):
    ours = FIRST_STEP[front_end](tiny_run.mixture(), tiny_run.dataset(), tmp_path, ACCUMULATION)
    assert tiny_run.distance(ours, gold[2]) < 2e-6


def test_the_trainers_log_it(gold, tmp_path):
    settings = {"logging_steps": 1, "max_steps": 2, "gradient_accumulation_steps": ACCUMULATION}
    settings |= {"learning_rate": 0.0, "router_aux_loss_coef": 0.1}
    run = trl_trainer(tmp_path, tiny_run.mixture(), tiny_run.dataset(), **settings)
    run.train()
    first, second, _ = run.state.log_history
    weighed = gold[0] - 0.4 * gold[1]  # by 0.1, and not by the 0.5 of the model
    assert first["loss"] == pytest.approx(weighed, rel=1e-5)
    assert first["aux_loss"] == pytest.approx(gold[1], rel=1e-5) != second["aux_loss"]


def test_a_coefficient_that_the_model_would_not_read_is_refused(tmp_path):
    model = tiny_run.mixture()

    class Own(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Own
    told = r"^router_aux_loss_coef=0.1: the forward of Own does not read it"
    with pytest.raises(ValueError, match=told):
        trl_trainer(tmp_path, model, tiny_run.dataset(), router_aux_loss_coef=0.1)


def test_it_is_logged_at_the_end_of_every_epoch(tmp_path):
    settings = {"logging_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1}
    run = trl_trainer(tmp_path, tiny_run.mixture(), tiny_run.dataset(), **settings)
    run.train()
    *epochs, _ = run.state.log_history
    assert len(epochs) == 3 and all("aux_loss" in log for log in epochs)


def test_lightning_logs_it(gold, tmp_path):
    logged: dict = {}
    note = LambdaCallback(on_train_end=lambda run, _: logged.update(run.callback_metrics))
    model, data = tiny_run.mixture(), tiny_run.dataset()
    lightning(model, data, tmp_path, ACCUMULATION, note, log_every_n_steps=1)
    assert logged["train/loss"] == pytest.approx(gold[0], rel=1e-5)
    assert logged["train/aux_loss"] == pytest.approx(gold[1], rel=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_padding_does_not_count(keep):
    model = tiny_run.mixture()
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    ours, padded = (
        model(**tiny_run.batch_of(tiny_run.dataset(), **settings))
        for settings in ({}, {"fixed_sequences": 16})
    )
    assert torch.allclose(ours.aux_loss, padded.aux_loss) and torch.allclose(ours.loss, padded.loss)
    alone = model(**tiny_run.batch_of(tiny_run.dataset()), num_items_in_batch=1e6)
    assert alone.aux_loss < 1e-3 * ours.aux_loss and loss.aux_loss == alone.aux_loss


def test_an_empty_batch_adds_nothing():
    model = tiny_run.mixture()
    attach_loss(model)
    for items in (None, 7):
        out = model(**PackedCollator()(Pack.of([], 8)), num_items_in_batch=items)
        out.loss.backward()
        assert out.loss == out.aux_loss == 0
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_compiled_layers_have_the_same_from_one_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, counter = tiny_run.mixture(), CompileCounterWithBackend("eager")
    attach_loss(model)
    batch = tiny_run.batch_of(tiny_run.dataset(), fixed_sequences=16)
    eager = model(**batch)
    eager.loss.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    compile_layers(model, backend=counter)
    model.gradient_checkpointing_enable()
    model.train().zero_grad()
    out = model(**batch)
    out.loss.backward()
    assert torch.allclose(out.aux_loss, eager.aux_loss) and torch.allclose(out.loss, eager.loss)
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gradient) < 2e-6 and counter.frame_count == 1
    assert len(model(**batch, output_hidden_states=True).hidden_states) == 3
    torch._dynamo.reset()


def test_a_forward_that_would_leave_it_out_is_refused():
    model = tiny_run.mixture()
    stock = type(model)

    class Own(stock):
        def forward(self, *args, **kwargs):
            return stock.forward(self, *args, **kwargs)

    model.__class__ = Own
    attach_loss(model)
    with pytest.raises(ValueError, match=r"^Own does not call self\.loss_function"):
        model(**tiny_run.batch_of(tiny_run.dataset()))


def test_checkpoints_that_would_lose_its_gradient_are_refused():
    model = tiny_run.mixture().train()
    attach_loss(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    batch = tiny_run.batch_of(tiny_run.dataset())
    with pytest.raises(ValueError, match=r"^the auxiliary loss has no gradient with reentrant"):
        model(**batch)
    model(**batch, output_router_logits=False).loss.backward()


def test_the_model_is_as_before_when_the_loss_is_detached():
    model, batch = tiny_run.mixture(), tiny_run.batch_of(tiny_run.dataset())
    before = model(**batch)
    attach_loss(model).detach()
    after = model(**batch, num_items_in_batch=int((batch["labels"] != -100).sum()))
    assert torch.allclose(after.aux_loss, before.aux_loss) and torch.equal(before.loss, after.loss)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
