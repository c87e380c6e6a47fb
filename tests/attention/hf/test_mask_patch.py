"""The repair of the stock implementations: documents apart under sdpa and eager."""

import copy
import types

import pytest
import torch
from nopad.attention import document_mask
from nopad.attention.hf import check_packed, mask_patch
from nopad.cli.tiny_model import randomize_weights, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FORGETFUL = ("gpt_oss", "opt", "falcon", "bloom", "mpt", "xglm", "afmoe", "biogpt")


def models(kind):
    """The type under eager and, where it can, under sdpa, with the same weights."""
    config = tiny_config(CONFIG_MAPPING[kind]())
    oracle = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    randomize_weights(oracle)
    yield oracle.eval(), oracle
    try:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    except ValueError:  # the type has no sdpa
        return
    model.load_state_dict(oracle.state_dict())
    yield model.eval(), oracle


@pytest.mark.parametrize("kind", FORGETFUL)
def test_models_that_forget_their_positions_leak_and_are_mended(kind):
    for model, oracle in models(kind):
        assert check_packed(model, oracle).leak > 1e-2, "no longer leaks: take it off the list"
        mended = check_packed(model, oracle, repair=True)
        assert mended.leak < 1e-4 and mended.right(), mended


def test_outside_of_keep_apart_nothing_is_changed():
    (model, _), *_ = models("opt")
    ids = torch.arange(3, 12)[None]
    before = model(input_ids=ids, use_cache=False).logits
    with document_mask(torch.tensor([0, 4, 9]), 9):
        inside = model(input_ids=ids, use_cache=False).logits
    assert not torch.equal(before, inside)
    assert torch.equal(before, model(input_ids=ids, use_cache=False).logits)


def test_a_moved_private_function_is_said_and_survived(caplog):
    moved = types.ModuleType("masking")
    assert mask_patch.install(moved, "nopad") is False
    assert "no longer prepares masks" in caplog.text
