"""Adapters of PEFT in every front end: exact gradients, and no logits of T x vocabulary.

Those that move a pack's tokens are refused.
"""

from __future__ import annotations

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from front_ends import FIRST_STEP
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader

peft = pytest.importorskip("peft", reason="adapters are PEFT's")


@pytest.mark.parametrize("front_end", FIRST_STEP)
def test_adapters_get_the_gradient_of_the_samples_one_by_one(front_end, tmp_path):
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_run.model(), config)
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    ours = FIRST_STEP[front_end](model, tiny_run.dataset(), tmp_path)
    assert ours.keys() == gold.keys() and all("lora_" in name for name in gold)
    assert tiny_run.distance(ours, gold) < 5e-6
    assert "logits" not in model(**tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 1)[0]))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("front_end", FIRST_STEP)
def test_adapters_of_virtual_tokens_are_refused(front_end, kind, tmp_path):
    """PEFT's forward puts them before a pack, where its boundaries do not count them."""
    with pytest.raises(ValueError, match=rf"^{kind} adds virtual tokens .*use LoRA"):
        FIRST_STEP[front_end](_virtual(tiny_run.model(), kind), tiny_run.dataset(), tmp_path)


def test_adapters_of_virtual_tokens_around_an_attached_loss_are_refused():
    accelerator, model = Accelerator(cpu=True), tiny_run.model()
    attach_loss(model)
    accelerator.prepare(_virtual(model, "PrefixTuningConfig"))
    with pytest.raises(ValueError, match=r"^PrefixTuningConfig adds virtual tokens"):
        next(iter(PackedAccelerateLoader(accelerator, tiny_run.dataset())))


def _virtual(model, kind: str):
    model.set_attn_implementation("sdpa")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(model, config)


def adapted(model, **settings):
    """The model wrapped by PEFT, with its trainable parameters changed a little."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
    for p in wrapped.parameters():
        p.data.add_(0.05 * torch.randn_like(p) * p.requires_grad)
    return wrapped


@pytest.mark.parametrize("how", ["modules_to_save", "target_modules"])
def test_peft_may_train_or_adapt_the_head_before_or_after(how):
    settings = {"target_modules": ["q_proj"], how: ["lm_head"]}
    batch, gradients = tiny_run.batch_of(tiny_run.dataset()), []
    for before, after in ((False, False), (True, False), (False, True)):
        model = tiny_run.model()
        if before:
            attach_loss(model)
        wrapped = adapted(model, **settings)
        if after:
            attach_loss(model)
        loss = wrapped(**batch).loss
        loss.backward()
        named = wrapped.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.requires_grad} | {"loss": loss})
    gold, *ours = gradients
    assert any("lm_head" in name for name in gold)
    for theirs in ours:
        assert theirs.keys() == gold.keys() and tiny_run.distance(theirs, gold) < 5e-6


def test_a_copied_head_brings_no_model_along():
    model = tiny_run.model()
    attach_loss(model)
    wrapped = adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    names = modules_within(wrapped.base_model.model.lm_head.modules_to_save["default"])
    assert names == {"Linear"}


def modules_within(root) -> set[str]:
    """The types of modules that an object refers to, directly or not."""
    seen, names, queue = set(), set(), [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            names.add(type(thing).__name__)
        queue += [getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
        if isinstance(thing, dict):
            queue += thing.values()
    return names
