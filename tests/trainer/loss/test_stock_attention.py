"""Stock `sdpa` and `eager` in every front end: right, repaired where they leak, else refused."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from front_ends import FIRST_STEP
from nopad.attention.hf import mask_patch
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from nopad.trainer.monitoring.packing_check import measure_leak
from transformers import AutoModelForCausalLM
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


def build(kind: str, attention: str):
    config = tiny_config(CONFIG_MAPPING[kind]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize_weights(model)
    return model


@pytest.mark.parametrize(
    ("kind", "front"),
    [pytest.param(kind, front, marks=() if front == "hf" or kind == "opt" else pytest.mark.slow)
     for kind in FORGETFUL for front in FIRST_STEP],
)  # fmt: skip
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
    [*((kind, "hf") for kind in FORGETFUL), ("opt", "accelerate"), ("opt", "lightning")],
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
