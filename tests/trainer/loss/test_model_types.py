"""The attached loss on models with special heads, logits or losses."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.trainer.loss import attach_loss

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_implementation="eager"))


def recurrent_gemma():
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES, lru_width=32))


def gemma4():
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {**SIZES, "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0}
    text |= {"global_head_dim": 8, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    return Gemma4ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma2, recurrent_gemma, gemma4])
def test_capped_logits_are_kept_and_the_loss_becomes_exact(make):
    torch.manual_seed(0)
    model = make()
    model.lm_head.weight.data.mul_(40)  # to where the cap bends
    ids = torch.randint(1, 61, (1, 20))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    stock = model(**batch).loss
    loss = attach_loss(model)
    assert not loss.fused
    assert torch.allclose(model(**batch).loss, stock)
    assert torch.allclose(model(**batch, num_items_in_batch=7).loss, stock * 19 / 7)


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_mixture_adds_to_its_loss_stays(keep):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, batch = (
        MixtralForCausalLM(MixtralConfig(**SIZES, **experts)),
        tiny_run.batch_of(tiny_run.dataset()),
    )
    stock = model(**batch).loss
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    assert torch.allclose(model(**batch).loss, stock)


def bart():
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
    return BartForCausalLM(BartConfig(vocab_size=61, decoder_ffn_dim=48, **sizes))


def test_a_model_with_a_loss_of_its_own_puts_ours_first():
    torch.manual_seed(0)
    model, ids = bart().eval(), torch.randint(3, 61, (1, 20))
    attach_loss(model)
    usual = model(input_ids=ids, labels=ids)
    assert next(iter(usual)) == "loss"
    first, logits, *_ = model(input_ids=ids, labels=ids, return_dict=False)
    assert torch.equal(first, usual.loss) and torch.equal(logits, usual.logits)


def test_a_forward_under_two_decorators_is_fused():
    from transformers import XGLMConfig, XGLMForCausalLM

    torch.manual_seed(0)
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4}
    model, ids = XGLMForCausalLM(XGLMConfig(vocab_size=61, **sizes)), torch.randint(3, 61, (1, 20))
    stock = model.eval()(input_ids=ids, labels=ids).loss
    loss = attach_loss(model)
    assert loss.fused
    ours = model(input_ids=ids, labels=ids)
    assert "logits" not in ours and torch.allclose(ours.loss, stock)


def test_a_model_that_shifts_its_logits_itself_keeps_them():
    from transformers import GitConfig, GitForCausalLM

    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = GitConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    model, ids = GitForCausalLM(config).eval(), torch.randint(3, 61, (1, 20))
    logits = model(input_ids=ids).logits[0, :-1]
    loss = attach_loss(model)
    assert not loss.fused
    ours = model(input_ids=ids, labels=ids).loss
    assert torch.allclose(ours, torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
