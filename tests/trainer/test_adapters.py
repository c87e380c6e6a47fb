"""Adapters of PEFT in every front end: exact gradients, and no logits of T x vocabulary."""

from __future__ import annotations

import pytest
import tiny_run
from front_ends import FIRST_STEP

peft = pytest.importorskip("peft", reason="adapters are PEFT's")


@pytest.mark.parametrize("front_end", FIRST_STEP)
def test_adapters_get_the_gradient_of_the_samples_one_by_one(front_end, tmp_path):
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_run.model(), config)
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    ours = FIRST_STEP[front_end](model, tiny_run.dataset(), tmp_path)
    assert ours.keys() == gold.keys() and all("lora_" in name for name in gold)
    assert tiny_run.distance(ours, gold) < 2e-6
    assert model(**tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 1)[0])).logits is None
