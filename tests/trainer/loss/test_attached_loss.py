"""The attached loss: exact, without logits, and removable without a trace."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
import transformers
from front_ends import Module
from nopad.attention import check_supported
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule


@pytest.mark.smoke("packed ≡ one by one")
@pytest.mark.parametrize("mean", ["token", "sample"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_step_equals_its_samples_one_by_one(mean, tied):
    model, data = tiny_run.model(tie_word_embeddings=tied), tiny_run.dataset()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(data, 3), mean)
    loss = attach_loss(model)
    assert loss.fused
    model(**tiny_run.batch_of(tiny_run.dataset(), mean=mean)).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("LlamaModel", {}, "has no LM head"),
        ("LlamaForQuestionAnswering", {}, "has no LM head"),
        ("BertLMHeadModel", {}, "is an encoder"),
        ("T5ForConditionalGeneration", {"num_layers": 1, "d_ff": 16}, "is an encoder-decoder"),
        ("BertLMHeadModel", {"is_decoder": True}, ""),
        ("LlamaForCausalLM", {}, ""),
    ],
)
def test_models_that_are_no_causal_lm_are_refused(name, config, told):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, intermediate_size=16, **config))
    if not told:
        return attach_loss(model).detach()
    with pytest.raises(ValueError, match=f"^{name} {told}.*: packs train causal and"):
        attach_loss(model)
    with pytest.raises(ValueError, match=f"cannot run this model: {name} {told}"):
        check_supported(model)


def test_a_resized_head_is_the_one_that_counts():
    batch = tiny_run.batch_of(tiny_run.dataset())
    model = tiny_run.model()
    loss = attach_loss(model)
    model(**batch)
    torch.manual_seed(0)
    model.resize_token_embeddings(80)
    ours = model(**batch).loss
    assert loss.fused
    loss.detach()
    assert torch.allclose(ours, model(**batch).loss)


def test_a_copy_of_the_model_computes_with_its_own_weights():
    from copy import deepcopy

    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    attach_loss(model)
    before = model(**batch).loss
    copied = deepcopy(model)
    for p in copied.parameters():
        p.data.mul_(1.1)
    ours = copied(**batch).loss
    ours.backward()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(**batch).loss, before)
    copied.nopad_loss.detach()
    assert torch.allclose(copied(**batch).loss, ours) and not torch.allclose(before, ours)


@pytest.mark.parametrize("keep", [False, True])
def test_who_wants_tuples_gets_them(keep):
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    usual = model(**batch)
    assert ("logits" in usual) is keep
    first, *rest = model(**batch, return_dict=False)
    assert torch.equal(first, usual.loss)
    assert len(rest) == keep and all(torch.equal(x, usual.logits) for x in rest)


@pytest.mark.parametrize("attached", ["before", "after"])
def test_accelerate_may_unwrap_a_model_and_leave_the_loss(attached):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import extract_model_from_parallel

    AcceleratorState._reset_state()  # another test's precision
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    attach_loss(model)
    ours = model(**batch).loss
    if attached == "after":  # as PackedAccelerateLoader does, with the prepared model
        model.nopad_loss.detach()
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    if attached == "after":
        attach_loss(prepared)
    assert torch.allclose(prepared(**batch).loss, ours, rtol=0.01)
    assert not torch.equal(prepared(**batch).loss, ours)
    bare = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    assert torch.equal(bare(**batch).loss, ours) and "logits" not in bare(**batch)
    bare.nopad_loss.detach()
    assert torch.allclose(bare(**batch).loss, ours)
    AcceleratorState._reset_state()


def test_without_labels_the_model_is_what_it_was():
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
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
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    total = model(**batch, num_items_in_batch=1).loss
    assert loss.token_losses.shape == batch["labels"].shape
    assert torch.allclose(loss.token_losses.sum(), total)
    assert not loss.token_losses[batch["labels"] == -100].any()


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_step_that_counts_nothing_has_loss_zero_and_no_gradient(keep, low, items):
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    model = model.half() if low else model
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    batch["labels"].fill_(-100)
    total = model(**batch, num_items_in_batch=items).loss
    total.backward()
    assert total == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_a_share_of_an_item_is_a_divisor_like_any_other():
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    attach_loss(model)
    one, half = (model(**batch, num_items_in_batch=torch.tensor(x)).loss for x in (1.0, 0.5))
    assert torch.allclose(half, 2 * one)


def test_a_model_is_pickled_without_its_loss_or_not_at_all(tmp_path):
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    ours = model(**batch).loss
    with pytest.raises(ValueError, match=r"nopad_loss\.detach\(\) before"):
        torch.save(model, tmp_path / "model.pt")
    loss.detach()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    attach_loss(loaded)
    assert torch.equal(loaded(**batch).loss, ours)


def test_a_trainer_does_not_replace_a_loss_with_other_options(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    data, model = tiny_run.dataset(), tiny_run.model()
    attach_loss(model, z_loss=0.1)
    with pytest.raises(ValueError, match=r"^the model's loss was attached with .*z_loss=0\.1"):
        PackedTrainer(model, args, train_dataset=data)
    packs = PackedDataModule(data)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[PackedCallback(packs)])
    with pytest.raises(ValueError, match=r"^the model's loss was attached with .*z_loss=0\.1"):
        trainer.fit(Module(model), packs)
    PackedTrainer(model, args, train_dataset=data, z_loss=0.1)
    PackedTrainer(model, args, train_dataset=data)  # another training of the same model
