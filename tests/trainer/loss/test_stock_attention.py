"""Stock `sdpa` and `eager` in every front end: right, repaired where they leak, else refused."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from front_ends import FIRST_STEP, Module
from nopad.attention.hf import mask_patch
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from nopad.trainer.monitoring.packing_difference import measure_leak
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FORGETFUL = {
    "gpt_oss": ["eager"],
    "opt": ["eager", "sdpa"],
    "falcon": ["eager", "sdpa"],
    "bloom": ["eager"],
    "mpt": ["eager"],
    "xglm": ["eager"],
    "afmoe": ["eager", "sdpa"],
    "biogpt": ["eager", "sdpa"],
}
"""Types that do not hand positions to the mask, and the stock attention they know."""
FAST = ("opt", "falcon", "gpt_oss")


def marks(kind: str, front: str):
    return () if kind == "opt" or (kind in FAST and front == "hf") else pytest.mark.slow


def build(kind: str, attention: str):
    config = tiny_config(CONFIG_MAPPING[kind]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize_weights(model)
    return model


@pytest.mark.parametrize(
    ("kind", "front"),
    [pytest.param(k, front, marks=marks(k, front)) for k in FORGETFUL for front in FIRST_STEP],
)
def test_a_packed_step_of_a_forgetful_model_equals_its_samples_one_by_one(
    kind, front, tmp_path, capsys
):
    for attention in FORGETFUL[kind]:
        model = build(kind, attention)
        assert measure_leak(model) > 1e-2, "no longer leaks: take it off the list"
        gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
        ours = FIRST_STEP[front](model, tiny_run.dataset(), tmp_path)
        assert tiny_run.distance(ours, gold) < 5e-6, attention
        assert "boundaries from the attention mask" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "front"),
    [
        *(pytest.param(kind, "hf", marks=marks(kind, "hf")) for kind in FORGETFUL),
        ("opt", "accelerate"),
        ("opt", "lightning"),
    ],
)
def test_without_the_repair_the_leak_is_named_and_the_run_refused(
    kind, front, tmp_path, monkeypatch
):
    mask_patch.uninstall_mask_patch()
    monkeypatch.setattr(mask_patch, "_TARGET", "moved")  # as if transformers had moved its masks
    model = build(kind, FORGETFUL[kind][-1])
    before = tiny_run.digest(model)
    with pytest.raises(ValueError, match=f"{kind} with .* lets packed samples see each other"):
        FIRST_STEP[front](model, tiny_run.dataset(), tmp_path)
    assert tiny_run.digest(model) == before


def test_a_leaking_model_without_our_loss_is_told_how_to_be_repaired():
    with pytest.raises(ValueError, match=r"opt with .*attach_loss\(model\) first"):
        check_run(build("opt", "sdpa"), tiny_run.dataset())


@pytest.mark.parametrize("front", FIRST_STEP)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_stock_attention_of_a_model_that_hands_on_positions_is_right(attention, front, tmp_path):
    model = tiny_run.model(attention)
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    ours = FIRST_STEP[front](model, tiny_run.dataset(), tmp_path)
    assert tiny_run.distance(ours, gold) < 2e-6


def test_a_loss_of_ones_own_from_repaired_logits_is_that_of_the_model():
    model = build("opt", "sdpa")
    attach_loss(model)
    check_run(model, tiny_run.dataset())
    batch = tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 1)[0])
    wanted, labels = float(model(**batch).loss.detach()), batch.pop("labels")
    logits = model(**batch).logits[0, :-1].detach()
    own = torch.nn.functional.cross_entropy(logits, labels[0, 1:])
    assert float(own) == pytest.approx(wanted, rel=1e-5)


def evaluate_hf(model, held_out, folder):
    args = TrainingArguments(str(folder), max_steps=1, use_cpu=True, report_to=[])
    run = PackedTrainer(model, args, train_dataset=tiny_run.dataset())
    return run.evaluate(held_out)["eval_loss"]


def evaluate_accelerate(model, held_out, folder):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset())
    with torch.no_grad():
        losses = [model(**batch).loss for batch in loader.validation(held_out)]
    return float(torch.stack(losses).mean())


class Validated(Module):
    def validation_step(self, batch, _):
        self.log("loss", self.model(**batch).loss, batch_size=1)


def evaluate_lightning(model, held_out, folder):
    packs = PackedDataModule(tiny_run.dataset(), held_out)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PackedCallback(packs)], enable_checkpointing=False, max_steps=1,
    )  # fmt: skip
    return trainer.validate(Validated(model), packs, verbose=False)[0]["loss"]


@pytest.mark.parametrize("evaluate", [evaluate_hf, evaluate_accelerate, evaluate_lightning])
def test_masks_are_repaired_for_an_evaluation_before_any_training(evaluate, tmp_path):
    model, held_out = build("opt", "sdpa").eval(), tiny_run.dataset(23)
    gold = float(tiny_run.gold_loss(model, list(held_out)).detach())
    assert evaluate(model, held_out, tmp_path) == pytest.approx(gold, rel=1e-5)
