"""Hybrids and recurrent models: a state starts at zero in every document of a pack."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny_run
import torch
from front_ends import FIRST_STEP_OF_LM
from nopad.attention.hf.leak_check import leaked_gradient
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_hf import PackedTrainer
from transformers import TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAST = ["jamba", "lfm2", "mamba2", "qwen3_next"]
SLOW = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "kimi_linear", "lfm2_moe", "mamba",
    "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma",
    "zamba2",
]  # fmt: skip
KINDS = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
IN_ONE_CALL = {"lfm2", "lfm2_moe", "recurrent_gemma"}
"""Types that have convolutions only, or whose own code resets the other state at position 0."""
DROPS_BOUNDARIES = {"falcon_mamba", "mamba", "mamba2"}
"""Types whose checkpointed layers cannot know where documents begin."""
DOCUMENTS = [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15, 16, 17, 18, 19], [4, 9]]


def tiny(kind):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind]()
    model, _ = tiny_model(config, every_kind=True, attn_implementation="nopad")
    randomize_weights(model)
    return model.train()


def pack(documents):
    """A row with its boundaries and labels."""
    ends = torch.tensor([len(d) for d in documents]).cumsum(0).tolist()
    bounds, longest = torch.tensor([0, *ends], dtype=torch.int32), max(map(len, documents))
    return {
        "input_ids": torch.tensor([[t for d in documents for t in d]]),
        "position_ids": torch.cat([torch.arange(len(d)) for d in documents])[None],
        "labels": torch.tensor([[t for d in documents for t in (-100, *d[1:])]]),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        "use_cache": False,
    }


def stock(model):
    """The same model, as Transformers runs it."""
    copied = deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied


def assert_like_one_by_one(model, alone):
    """Compare the loss and the gradients of a pack with those of its documents in another model."""
    batch, losses = pack(DOCUMENTS), []
    loss = model(**batch).loss
    loss.backward()
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        losses.append(alone(input_ids=ids, labels=ids, use_cache=False).loss * (len(document) - 1))
    expected = torch.stack(losses).sum() / (batch["labels"] != -100).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if name in gradients:
            distance = (parameter.grad - gradients[name]).norm()
            assert distance <= 1e-4 * gradients[name].norm() + 1e-7, name


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_one_by_one(kind):
    model = tiny(kind)
    alone = stock(model)
    loss = attach_loss(model)
    assert bool(loss.reset_states.names) is (kind not in IN_ONE_CALL)
    assert_like_one_by_one(model, alone)
    batch = pack(DOCUMENTS)
    del batch["labels"]
    assert leaked_gradient(model, batch, [len(d) for d in DOCUMENTS]) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_know_the_documents_or_say_that_they_do_not(kind):
    model = tiny(kind)
    alone = stock(model)
    model.gradient_checkpointing_enable()
    attach_loss(model)
    if kind not in DROPS_BOUNDARIES:
        return assert_like_one_by_one(model, alone)
    with pytest.raises(ValueError, match="train it without gradient checkpointing"):
        model(**pack(DOCUMENTS)).loss.backward()


@pytest.mark.parametrize("front_end", FIRST_STEP_OF_LM)
def test_a_step_of_every_front_end_is_that_of_its_documents(front_end, tmp_path):
    model = tiny("qwen3_5_text")
    gold = tiny_run.gold_gradient(stock(model), tiny_run.packs(tiny_run.dataset(), 2))
    found = FIRST_STEP_OF_LM[front_end](model, tiny_run.dataset(), tmp_path)
    assert tiny_run.distance(found, gold) < 1e-5


def test_many_types_are_held_to_it():
    assert len({*FAST, *SLOW}) >= 18


def test_a_trainer_says_what_runs_document_by_document(tmp_path, capsys):
    args = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to="none")
    trainer = PackedTrainer(tiny("mamba2"), args, train_dataset=tiny_run.dataset())
    trainer.train()
    said = capsys.readouterr().out
    assert "leak check 0.0" in said and "document by document (slow): Mamba2Mixer" in said


def test_detaching_gives_the_classes_back():
    model = tiny("lfm2")
    before = [type(module) for module in model.modules()]
    loss = attach_loss(model)
    assert [type(module) for module in model.modules()] != before
    loss.detach()
    assert [type(module) for module in model.modules()] == before
