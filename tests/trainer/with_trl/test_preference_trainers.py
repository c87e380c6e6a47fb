"""TRL's preference trainers on packs equal TRL's on padded batches."""

from __future__ import annotations

import pytest
import torch
from char_words import char_tokenizer
from datasets import Dataset

trl = pytest.importorskip("trl", reason="the trainers are TRL's")

from nopad.trainer.with_trl import (  # noqa: E402
    PackedDPOTrainer,
    PackedKTOTrainer,
    PackedRewardTrainer,
)
from transformers import (  # noqa: E402
    JambaConfig,
    JambaForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
         "eos_token_id": 0, "bos_token_id": None}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
PAIRS = Dataset.from_list([
    {"prompt": "abcd", "chosen": "ef", "rejected": "ghgh"},
    {"prompt": "h", "chosen": "efghefgh", "rejected": "a"},
    {"prompt": "gfedcbahg", "chosen": "b", "rejected": "cd"},
    {"prompt": "ab", "chosen": "abc", "rejected": "hgfedc"},
])  # fmt: skip
ANSWERS = Dataset.from_list([
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS for name in ("chosen", "rejected")
])  # fmt: skip


def causal_lm(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, router_aux_loss_coef=0.1))


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1))


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def build(kind, config, model, folder, data=PAIRS, more=None, **settings):
    args = config(
        str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
        max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0,
        disable_tqdm=True, learning_rate=1.0, optim="sgd", **settings,
    )  # fmt: skip
    more = {name: make() for name, make in (more or {}).items()}
    tokenizer = char_tokenizer()
    return kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)


def trained(trainer) -> tuple[list[dict], dict[str, torch.Tensor]]:
    trainer.train()
    timed = ("runtime", "per_second", "flos")
    logs = [
        {name: value for name, value in line.items() if not any(t in name for t in timed)}
        for line in trainer.state.log_history
    ]
    return logs, {name: p.detach() for name, p in trainer.model.named_parameters()}


def check_equal(packed, padded) -> None:
    (packed_logs, packed_weights), (padded_logs, padded_weights) = trained(packed), trained(padded)
    for line, expected in zip(packed_logs, padded_logs, strict=True):
        assert line == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for name, weight in packed_weights.items():
        torch.testing.assert_close(weight, padded_weights[name], atol=1e-5, rtol=1e-5)


DPO_CASES = {
    "a reference": ({"ref_model": lambda: causal_lm(1)}, {}),
    "precomputed references": (
        {"ref_model": lambda: causal_lm(1)}, {"precompute_ref_log_probs": True},
    ),
    "lora": ({"peft_config": lora}, {}),
    "other losses": (
        {"ref_model": lambda: causal_lm(1)},
        {"loss_type": ["ipo", "sigmoid"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5,
         "use_weighting": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DPO_CASES)
def test_packed_dpo_equals_padded_dpo(case, tmp_path):
    more, settings = DPO_CASES[case]
    run = [
        build(kind, trl.DPOConfig, causal_lm(), tmp_path, more=more, **settings)
        for kind in (PackedDPOTrainer, trl.DPOTrainer)
    ]
    check_equal(*run)


def test_packed_dpo_of_experts_equals_padded_dpo_with_its_auxiliary_loss(tmp_path):
    more = {"ref_model": experts}
    run = [
        build(kind, trl.DPOConfig, experts(), tmp_path, more=more)
        for kind in (PackedDPOTrainer, trl.DPOTrainer)
    ]
    check_equal(*run)
    assert "aux_loss" in run[0].state.log_history[0]


@pytest.mark.parametrize("data", [PAIRS, PAIRS.add_column("margin", [0.1, 0.5, 0.0, 1.0])])
def test_packed_rewards_equal_padded_rewards(data, tmp_path):
    run = [
        build(kind, trl.RewardConfig, classifier(), tmp_path, data, center_rewards_coefficient=0.1)
        for kind in (PackedRewardTrainer, trl.RewardTrainer)
    ]
    check_equal(*run)


def test_rewards_of_a_hybrid_are_refused(tmp_path):
    layers = {"mamba_expand": 1, "use_mamba_kernels": False}
    config = JambaConfig(**SMALL, **layers, num_labels=1)
    model = JambaForSequenceClassification(config)
    with pytest.raises(ValueError, match=r"keeps a state \(Jamba\w+\).* use TRL's trainer"):
        build(PackedRewardTrainer, trl.RewardConfig, model, tmp_path)


def test_packed_kto_equals_padded_kto(tmp_path):
    more = {"ref_model": lambda: causal_lm(1)}
    run = [
        build(kind, trl.KTOConfig, causal_lm(), tmp_path, ANSWERS, more)
        for kind in (PackedKTOTrainer, trl.KTOTrainer)
    ]
    check_equal(*run)


def test_wrong_use_is_told_in_one_line(tmp_path):
    def told(line, more=None, **settings):
        with pytest.raises(ValueError, match=line) as info:
            more = {"ref_model": causal_lm, **(more or {})}
            build(PackedDPOTrainer, trl.DPOConfig, causal_lm(), tmp_path, more=more, **settings)
        assert "\n" not in str(info.value)

    told("^padding_free=True has no effect: batches are packed already", padding_free=True)
    told("^pad_to_multiple_of=8 has no effect", pad_to_multiple_of=8)
    told("^budget=0: a pack has at least one token", {"budget": lambda: 0})
    larger = lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 24}))  # noqa: E731
    told("^ref_model has a vocabulary of 24 tokens, the model one of 16", {"ref_model": larger})


def test_a_reference_with_another_tokenizer_is_refused(tmp_path):
    def reference(names: str):
        causal_lm(1).save_pretrained(tmp_path / names)
        char_tokenizer(names).save_pretrained(tmp_path / names)
        return LlamaForCausalLM.from_pretrained(tmp_path / names)

    def built(names: str):
        more = {"ref_model": lambda: reference(names)}
        return build(PackedDPOTrainer, trl.DPOConfig, causal_lm(), tmp_path, more=more)

    assert built("abcdefgh").ref_model is not None
    with pytest.raises(ValueError, match=r"^ref_model .*: token 2 is 'h', the model's is 'a'"):
        built("hgfedcba")  # of the same size


def test_a_reference_that_is_synchronized_cannot_be_resumed(tmp_path):
    more = {"ref_model": lambda: causal_lm(1)}
    run = build(
        PackedDPOTrainer, trl.DPOConfig, causal_lm(), tmp_path, more=more, sync_ref_model=True
    )
    with pytest.raises(ValueError, match=r"^sync_ref_model=True: checkpoints have no reference"):
        run.train(resume_from_checkpoint=True)


def test_a_budget_splits_a_batch_into_packs_of_the_same_loss(tmp_path):
    more = {"ref_model": lambda: causal_lm(1)}
    split = build(
        PackedDPOTrainer, trl.DPOConfig, causal_lm(), tmp_path, more={**more, "budget": lambda: 14}
    )
    check_equal(split, build(trl.DPOTrainer, trl.DPOConfig, causal_lm(), tmp_path, more=more))
    with pytest.raises(ValueError, match=r"^a sequence of 11 tokens exceeds budget=8: raise it"):
        build(
            PackedDPOTrainer,
            trl.DPOConfig,
            causal_lm(),
            tmp_path,
            more=more | {"budget": lambda: 8},
        ).train()
