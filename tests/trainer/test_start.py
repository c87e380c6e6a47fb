"""Before the first step: what would train wrongly is refused, what is repaired is right."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.trainer.loader import PackedLoader
from nopad.trainer.loss import attach_loss
from nopad.trainer.start import check_batches, check_run, first_check, leak

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}


def build(kind: str, attention: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {
        "opt": {"ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32},
        "mamba": {"state_size": 4},
        "bloom": {"n_head": 4, "n_layer": 2},
    }[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_the_banner_says_what_runs_and_what_to_expect():
    first, second = check_run(tiny_run.model(), tiny_run.dataset())
    assert first == "llama, attention nopad, boundaries by cu_seq_lens, leak self-test 0.0"
    assert "packs of 32 an epoch, fill 9" in second and "dropped 0" in second


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_stock_attention_is_right_with_our_batch(attention):
    model = tiny_run.model(attention)
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    assert leak(model) == 0.0
    model(**PackedCollator()(tiny_run.packs(tiny_run.dataset(), 2))).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_models_that_lose_the_boundaries_are_repaired(kind):
    model = build(kind, "eager").eval()
    assert leak(model) > 1e-3
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    attach_loss(model)
    assert "document numbers in the mask" in check_run(model, tiny_run.dataset())[0]
    model(**PackedCollator()(tiny_run.packs(tiny_run.dataset(), 2))).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 5e-6


def test_a_model_that_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_run(build("mamba", "eager"), tiny_run.dataset())


def test_a_sequence_beyond_the_positions_is_refused():
    data = PackedDataset([[1] * 100], budget=128)
    with pytest.raises(ValueError, match="100 tokens is beyond the model's 64 positions"):
        check_run(tiny_run.model(), data)


def test_sample_weights_without_the_loss_that_reads_them_are_refused():
    with pytest.raises(ValueError, match="needs the exact loss"):
        check_run(tiny_run.model(), tiny_run.dataset(), PackedCollator(mean="sample"))


def test_labels_of_another_vocabulary_are_refused_before_the_first_step():
    loader = PackedLoader(PackedDataset([[5, 61, 7]], budget=32))
    loader.first_check = first_check(tiny_run.model())
    with pytest.raises(ValueError, match="token 61 is outside the model's vocabulary of 61"):
        next(iter(loader))


def test_a_step_without_a_single_counted_label_is_refused():
    batch = PackedCollator()([{"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(ValueError, match="no label of the first step counts"):
        check_batches([batch], vocabulary=61, positions=None)


def test_the_check_leaves_every_module_in_its_mode():
    model = tiny_run.model()
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    leak(model)
    assert [module.training for module in model.modules()] == before
