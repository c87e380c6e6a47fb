"""A `compute_loss` of a user's trainer: it is called, and its scale is known, or it is refused."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from hf_child import sum_over_items, trainer
from nopad.trainer.with_hf import PackedTrainer, PackedTrainerMixin
from transformers import Trainer


class FromLogits(PackedTrainer):
    """The mean of a batch, from logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, labels[0, 1:])


def test_a_loss_of_one_s_own_says_whether_it_is_scaled(tmp_path):
    with pytest.raises(ValueError, match=r"^FromLogits\.compute_loss .* a step has 3 batches: set"):
        trainer(tmp_path, tiny_run.dataset(), 3, kind=FromLogits, max_steps=1)[0].train()
    run, watch = trainer(tmp_path, tiny_run.dataset(), 1, kind=FromLogits, max_steps=3)
    run.args.learning_rate = 0.0
    run.train()  # one batch a step: nothing to scale
    FromLogits.loss_is_scaled_for_ga = False
    try:
        run, scaled = trainer(tmp_path, tiny_run.dataset(), 3, kind=FromLogits, max_steps=1)
        run.train()
    finally:
        FromLogits.loss_is_scaled_for_ga = None
    assert scaled.losses == [pytest.approx(sum(watch.losses) / 3, rel=1e-6)]


class FromModel(PackedTrainer):
    """The mean of a batch, from the model."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def test_a_loss_that_is_declared_the_mean_of_a_batch_is_divided_once(tmp_path):
    run, batches = trainer(tmp_path, tiny_run.dataset(), 1, kind=FromModel, max_steps=3)
    run.args.learning_rate = 0.0
    run.train()
    run, step = trainer(tmp_path, tiny_run.dataset(), 3, kind=FromModel, max_steps=1)
    run.train()
    assert step.losses == [pytest.approx(sum(batches.losses) / 3, rel=1e-6)]


def test_a_loss_function_gets_the_count_in_evaluations_too(tmp_path):
    functions = ({}, {"compute_loss_func": sum_over_items})
    runs = [trainer(tmp_path, tiny_run.dataset(), 1, more, max_steps=1)[0] for more in functions]
    stock, own = (run.evaluate(tiny_run.dataset(23))["eval_loss"] for run in runs)
    assert own == pytest.approx(stock, rel=1e-6)


class Doubled(Trainer):
    """A trainer of another library, with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return 2 * loss


def test_a_loss_below_the_mixin_is_refused_and_called_above_it(tmp_path):
    class Below(PackedTrainerMixin, Doubled):
        pass

    class Above(Doubled, PackedTrainer):
        pass

    told = r"^Doubled\.compute_loss would not be called: .* class Below\(Doubled, PackedTrainer\)$"
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, tiny_run.dataset(), 2, kind=Below, max_steps=1)
    losses = []
    for kind in (PackedTrainer, Above):
        run, watch = trainer(tmp_path, tiny_run.dataset(), 2, kind=kind, max_steps=1)
        run.train()
        losses += watch.losses
    assert losses[1] == pytest.approx(2 * losses[0])


@pytest.mark.parametrize("name", ["DPO", "Reward", "GKD", "SFT"])
def test_trainers_of_trl_that_do_not_train_on_packs_say_so(name, tmp_path):
    trl = pytest.importorskip("trl", reason="the trainers are TRL's")
    if name == "GKD":
        trl = pytest.importorskip("trl.experimental.gkd", reason="an experimental trainer")
    base, arguments = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    args = arguments(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to=[])
    told, kind = f"^{name}Trainer computes its loss from its own batches", base
    if name == "SFT":
        kind = type("Mine", (base,), {"compute_loss": Doubled.compute_loss})
        told = r"^Mine\.compute_loss would not be called: .* class Packed\(Mine, PackedSFTTrainer\)"
    packed = type("Packed", (PackedTrainerMixin, kind), {})
    with pytest.raises(ValueError, match=told):
        packed(tiny_run.model(), args, None, tiny_run.dataset())
