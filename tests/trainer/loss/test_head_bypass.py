"""The LM head is bypassed only while logits are nothing but its product."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.trainer.loss import attach_loss
from transformers import AutoConfig, AutoModelForCausalLM


def mask_vocabulary(head):
    return head.register_forward_hook(lambda *given: given[-1].masked_fill(MASKED, -30.0)).remove


def cap_logits(head):
    before = head.forward
    head.forward = lambda hidden: 0.1 * torch.tanh(before(hidden) / 0.1)
    return lambda: delattr(head, "forward")


def shift_inputs(head):
    return head.register_forward_pre_hook(lambda _, args: (args[0] + 1.0,)).remove


def halve_gradients(head):
    return head.register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],)).remove


def scale_everywhere(head):
    def halve(module, args, out):
        return 0.5 * out if module is head else None

    return torch.nn.modules.module.register_module_forward_hook(halve).remove


MASKED = torch.arange(tiny_run.VOCABULARY) % 2 == 0
CHANGES = [mask_vocabulary, cap_logits, shift_inputs, halve_gradients, scale_everywhere]


def loss_and_gradient(model):
    model.zero_grad()
    loss = model(**tiny_run.batch_of(tiny_run.dataset())).loss
    loss.backward()
    return loss.detach(), model.model.embed_tokens.weight.grad.clone()


@pytest.mark.parametrize("first", ["change", "loss"])
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_patches_of_the_head_count_whenever_they_come(change, first):
    model = tiny_run.model()
    plain = loss_and_gradient(model)
    undo = change(model.lm_head)
    gold = loss_and_gradient(model)
    assert not torch.allclose(gold[1], plain[1], rtol=1e-3)
    if first == "loss":
        undo()
        attach_loss(model)
        undo = change(model.lm_head)
    else:
        attach_loss(model)
    try:
        assert not model.nopad_loss.fused
        torch.testing.assert_close(loss_and_gradient(model), gold)
    finally:
        undo()
    assert model.nopad_loss.fused
    torch.testing.assert_close(loss_and_gradient(model), plain)


def test_a_patch_around_the_bypass_stays_when_the_loss_is_detached():
    model = tiny_run.model()
    loss = attach_loss(model)
    cap_logits(model.lm_head)
    ours = loss_and_gradient(model)
    loss.detach()
    torch.testing.assert_close(loss_and_gradient(model), ours)


SCALED = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.3}, "phi": {}}


@pytest.mark.parametrize("family", SCALED)
def test_the_bias_of_a_head_is_scaled_with_the_logits(family):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **SCALED[family], tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nopad").eval()
    model.lm_head = torch.nn.Linear(32, 61)
    model.lm_head.bias.data.mul_(20)

    def measure():
        model.zero_grad()
        loss = model(**tiny_run.batch_of(tiny_run.dataset())).loss
        loss.backward()
        return loss.detach(), *(p.grad.clone() for p in model.lm_head.parameters())

    gold = measure()
    assert attach_loss(model).fused
    torch.testing.assert_close(measure(), gold)


USES = {
    "indexed": lambda logits: logits[0, :-1],
    "attribute": lambda logits: logits.argmax(-1),
    "function": lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(1).long()),
    "arithmetic": lambda logits: logits / 2,
    "length": len,
}


@pytest.mark.parametrize("use", USES)
def test_who_uses_logits_that_were_not_computed_is_told_how_to_get_them(use):
    model, batch = tiny_run.model(), tiny_run.batch_of(tiny_run.dataset())
    attach_loss(model)
    out = model(**batch)
    assert "logits" not in out and len(out.to_tuple()) == 1 and "not computed" in repr(out)
    with pytest.raises(ValueError, match=r"^no logits: .* model\.nopad_loss\.keep_logits\(\)"):
        USES[use](out.logits)
    model.nopad_loss.keep_logits()
    assert model(**batch).logits.shape[-1] == tiny_run.VOCABULARY
