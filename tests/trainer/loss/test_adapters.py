"""Adapters of PEFT in every front end: exact gradients, and no logits of T x vocabulary.

Those that move a pack's tokens are refused.
"""

from __future__ import annotations

import pytest
import tiny_run
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
    assert tiny_run.distance(ours, gold) < 2e-6
    assert model(**tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 1)[0])).logits is None


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
