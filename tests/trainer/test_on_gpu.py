"""What only a GPU can show: stock flash-attn 2, bf16, torch_compile with the collator's batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from front_ends import gradient, hf
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.runtime import gather_rng_states, load_rng_states
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring.packing_difference import measure_leak
from nopad.trainer.with_hf import PackedTrainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def dataset() -> PackedDataset:
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 512, n).tolist() for n in draw.integers(2, 200, 60)]
    return PackedDataset(rows, budget=512, seed=3)


def model(attention: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, attn_implementation=attention)
    return LlamaForCausalLM(config).to(DEVICE, dtype)


def error(ours: dict, gold: dict) -> float:
    """The length of the difference of all gradients, relative to the gradient's."""
    apart = sum((ours[name].float() - gold[name].float()).square().sum() for name in gold)
    return float((apart / sum(g.float().square().sum() for g in gold.values())).sqrt())


def one_by_one(dtype: torch.dtype, count: int = 2) -> dict:
    return tiny_run.gold_gradient(model("eager", dtype), tiny_run.packs(dataset(), count))


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", "nopad"])
def test_a_packed_bf16_step_is_as_near_to_fp32_as_samples_one_by_one(attention, attached):
    gold, low = one_by_one(torch.float32), one_by_one(torch.bfloat16)
    trained = model(attention, torch.bfloat16)
    assert measure_leak(trained) == 0.0
    if attached:
        attach_loss(trained)
    batch = PackedCollator()(tiny_run.packs(dataset(), 2))
    batch = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in batch.items()}
    trained(**batch).loss.backward()
    assert error(gradient(trained), gold) <= 2 * error(low, gold)


@pytest.mark.parametrize("option", ["bf16", "torch_compile", "gradient_checkpointing"])
@pytest.mark.parametrize("attention", ["flash_attention_2", "nopad"])
def test_a_mixed_precision_step_is_that_of_samples_one_by_one(attention, option, tmp_path, capsys):
    settings = {"use_cpu": DEVICE == "cpu", "bf16": True, option: True}
    ours = hf(model(attention), dataset(), tmp_path, accumulation=2, **settings)
    ours = {name.replace("_orig_mod.", ""): value for name, value in ours.items()}
    assert error(ours, one_by_one(torch.float32)) <= 2 * error(
        one_by_one(torch.bfloat16), one_by_one(torch.float32)
    )
    banner = capsys.readouterr().out
    assert "leak check 0.0" in banner
    is_compiled = attention == "nopad" and option != "torch_compile"
    assert ("compiled layers" in banner) == is_compiled


@pytest.mark.parametrize("tokens", [1, 37, 256])
def test_a_product_in_fp8_is_that_of_values_that_were_cast(tokens):
    from nopad.trainer.layers.fp8_product import Fp8Product, cast

    torch.manual_seed(0)
    x, d_out = torch.randn(tokens, 512, device="cuda"), torch.randn(tokens, 256, device="cuda")
    weight = torch.randn(256, 512, device="cuda", requires_grad=True)
    x = x.bfloat16().requires_grad_()
    out = Fp8Product.apply(x, weight)
    out.backward(d_out.bfloat16())
    x8, d8 = (v.float() * s for v, s in (cast(x.detach(), True), cast(d_out.bfloat16(), True)))
    values, scale = cast(weight.detach())
    w8 = values.float() * scale
    for found, expected in (out, x8 @ w8.T), (x.grad, d8 @ w8), (weight.grad, d8.T @ x8):
        assert (found - expected).norm() < 0.01 * expected.norm()


def losses(folder, **options) -> list[float]:
    """Train 20 steps on a model whose larger products fp8 takes, and return their losses."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 2048, "intermediate_size": 4096}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
    trained = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="nopad"))
    args = TrainingArguments(
        str(folder), max_steps=20, bf16=True, logging_steps=1, learning_rate=3e-4, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = PackedDataset([row["input_ids"] for row in tiny_run.samples(200)], budget=512, seed=3)
    trainer = PackedTrainer(trained, args, train_dataset=data, **options)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_losses_in_fp8_are_those_in_bf16_but_for_rounding(tmp_path, capsys):
    bf16, fp8 = losses(tmp_path), losses(tmp_path, fp8=True)
    assert "compiled layers with fp8 products" in capsys.readouterr().out
    assert bf16[0] - bf16[-1] > 0.5 and bf16 != fp8
    assert max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) < 0.1


def test_random_numbers_of_the_gpu_go_on_where_a_checkpoint_was_taken():
    device = torch.device("cuda", 0)
    saved = gather_rng_states(device)
    drawn = torch.rand(8, device=device).tolist() + torch.rand(8).tolist()
    load_rng_states(saved, device)
    assert torch.rand(8, device=device).tolist() + torch.rand(8).tolist() == drawn


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", ["olmoe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_train_in_any_precision(kind, precision, tmp_path, capsys):
    config = tiny_config(CONFIG_MAPPING[kind](), layers=6)
    config.update({"vocab_size": 512, "hidden_size": 256})
    experts = AutoModelForCausalLM.from_config(config, attn_implementation="nopad")
    randomize_weights(experts)
    experts.to(DEVICE, torch.bfloat16 if precision == "bf16" else torch.float32)
    assert hf(experts, dataset(), tmp_path, use_cpu=False, bf16=precision == "autocast")
    assert "leak check 0.0" in capsys.readouterr().out


def test_a_fresh_process_with_a_cold_cache_trains_the_same_bits(tmp_path):
    script = Path(__file__).parent / "support" / "compiled_child.py"
    digests = [
        subprocess.run(
            [sys.executable, script],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)},
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()[-1]
        for name in ("first", "second")
    ]  # fmt: skip
    assert digests[0] == digests[1] and len(digests[0]) > 16
