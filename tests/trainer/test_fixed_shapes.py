"""Collators of constant shapes in every front end, with the check before the first step on."""

from __future__ import annotations

import pytest
import tiny_run
from front_ends import FIRST_STEP
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.trainer.monitoring.packing_difference import measure_leak
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FIXED = {
    "fill": {"pad_to_budget": True, "mean": "sample"},
    "stack": {"stack": True},
    "fixed": {"fixed_sequences": 16},
}


@pytest.mark.parametrize("shapes", FIXED)
@pytest.mark.parametrize("front", FIRST_STEP)
def test_a_step_of_constant_shape_equals_its_samples_one_by_one(front, shapes, tmp_path):
    model, mean = tiny_run.model(), FIXED[shapes].get("mean", "token")
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2), mean)
    collator = PackedCollator(**FIXED[shapes])
    ours = FIRST_STEP[front](model, tiny_run.dataset(), tmp_path, collator=collator)
    assert tiny_run.distance(ours, gold) < 2e-6


def test_masks_are_repaired_under_constant_shapes_too(tmp_path):
    config = tiny_config(CONFIG_MAPPING["opt"]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomize_weights(model)
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    collator = PackedCollator(fixed_sequences=16)
    ours = FIRST_STEP["hf"](model, tiny_run.dataset(), tmp_path, collator=collator)
    assert tiny_run.distance(ours, gold) < 5e-6


@pytest.mark.parametrize("room", [1, 2])
def test_the_check_asks_no_more_of_a_collator_than_the_data_does(room, tmp_path):
    data = PackedDataset([[1, 2, 3, 4]] * 4, budget=4 * room)
    collator = PackedCollator(fixed_sequences=room, max_length=4)
    ours = FIRST_STEP["hf"](tiny_run.model(), data, tmp_path, collator=collator)
    assert ours


def test_a_leak_is_found_under_constant_shapes():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes))
    for shapes in (
        {"stack": True},
        {"fixed_sequences": 2},
        {"fixed_sequences": 9, "max_length": 2},
    ):
        assert measure_leak(model, PackedCollator(**shapes)) > 1e-2, shapes
