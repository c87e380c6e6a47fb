"""Axolotl with the plugin: losses of PackedTrainer, evaluations by generation, refused settings.

The first test needs Axolotl, whose pins differ from ours: `.ci/axolotl` runs it in an environment
of its own. The others also run without Axolotl, on a base class without methods.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_inputs import write_inputs
from transformers import AutoTokenizer, LlamaForCausalLM, TrainingArguments

HAS_AXOLOTL = importlib.util.find_spec("axolotl") is not None
PLUGIN = "nopad.integrations.axolotl.NopadPlugin"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
TRAINING = {"learning_rate": 2e-3, "gradient_accumulation_steps": 2, "warmup_steps": 2}
SETTINGS = {
    "sequence_len": 256, "micro_batch_size": 2, "sample_packing": True, "eval_sample_packing": True,
    "pad_to_sequence_len": True, "val_set_size": 0.1, "adapter": "lora", "lora_r": LORA["r"],
    "lora_alpha": LORA["lora_alpha"], "lora_target_modules": LORA["target_modules"],
    "num_epochs": 2, "optimizer": "adamw_torch", "lr_scheduler": "cosine", "bf16": False,
    "gradient_checkpointing": True, "logging_steps": 1, "flash_attention": True,
    "evals_per_epoch": 1, "saves_per_epoch": 1, "weight_decay": 0.0, "dataset_num_proc": 1,
    "special_tokens": {"pad_token": "<|end_of_text|>"}, "nopad_eval_max_tokens": 4, **TRAINING,
}  # fmt: skip
"""The keys of Axolotl's example of LoRA for a small Llama (examples/llama-3/lora-1b.yml)."""


@pytest.fixture
def plugin(monkeypatch):
    if not HAS_AXOLOTL:
        base: ModuleType = ModuleType("axolotl.integrations.base")
        base.BasePlugin = type("BasePlugin", (), {})
        for name in ("axolotl", "axolotl.integrations", base.__name__):
            monkeypatch.setitem(sys.modules, name, base)
    monkeypatch.delitem(sys.modules, "nopad.integrations.axolotl", raising=False)
    return importlib.import_module("nopad.integrations.axolotl").NopadPlugin()


@pytest.mark.skipif(not HAS_AXOLOTL, reason="Axolotl pins other versions: run .ci/axolotl")
def test_axolotl_trains_with_the_losses_of_packed_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")  # read when Axolotl is imported
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train
    from nopad import PackedTrainer
    from nopad.integrations.axolotl_trainer import NopadTrainer
    from peft import LoraConfig, get_peft_model

    write_inputs(tmp_path)
    rows = {"path": str(tmp_path / "alpaca.jsonl"), "ds_type": "json", "type": "alpaca"}
    paths = {"base_model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"),
             "dataset_prepared_path": str(tmp_path / "prepared"), "datasets": [rows],
             "nopad_eval_data": str(tmp_path / "examples.jsonl"),
             "nopad_eval_output": str(tmp_path / "completions.jsonl")}  # fmt: skip
    path = tmp_path / "lora.yml"
    path.write_text(yaml.safe_dump({"plugins": [PLUGIN], **SETTINGS, **paths}))
    cfg = load_cfg(str(path))
    meta = load_datasets(cfg=cfg)
    first: dict[str, torch.Tensor] = {}
    stock = NopadTrainer.train

    def keep_and_train(trainer, *args, **kwargs):
        first.update({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        return stock(trainer, *args, **kwargs)

    monkeypatch.setattr(NopadTrainer, "train", keep_and_train)
    *_, trainer = train(cfg=cfg, dataset_meta=meta)
    assert trainer.model.config._attn_implementation == "nopad"
    assert trainer.train_dataset.settings["budget"] == 512

    base = LlamaForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="nopad")
    model = get_peft_model(base, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    args = TrainingArguments(
        str(tmp_path / "ours"), seed=trainer.args.seed, num_train_epochs=2,
        lr_scheduler_type="cosine", weight_decay=0.0, optim="adamw_torch", logging_steps=1,
        report_to="none", use_cpu=True, **TRAINING,
    )  # fmt: skip
    ours = PackedTrainer(
        model, args, train_dataset=meta.train_dataset, eval_dataset=meta.eval_dataset, budget=512
    )
    ours.train()
    assert logged(trainer, "loss") == logged(ours, "loss") and len(logged(ours, "loss")) > 4
    assert logged(trainer, "eval_loss")[-1] == ours.evaluate()["eval_loss"]
    assert logged(trainer, "eval_examples") == [3, 3, 3], "at the start and after every epoch"
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 9


def logged(trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def test_completions_of_evaluations_are_written_to_the_file_of_the_settings(plugin, tmp_path):
    import nopad.attention  # noqa: F401

    write_inputs(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="nopad")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    trainer = SimpleNamespace(model=model, processing_class=tokenizer)
    path = tmp_path / "completions.jsonl"
    settings = sys.modules[type(plugin).__module__].NopadArgs(
        nopad_eval_data=str(tmp_path / "examples.jsonl"), nopad_eval_output=str(path)
    )
    (callback,) = plugin.add_callbacks_post_trainer(settings, trainer)
    callback.evaluations[0].run(6)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 3 and rows[0]["step"] == 6 and {*rows[0]["scores"]} == {"exact_match"}


def test_axolotl_s_packing_and_attention_are_replaced(plugin):
    cfg = {"sample_packing": True, "pad_to_sequence_len": True, "flash_attention": True,
           "lora_qkv_kernel": True}  # fmt: skip
    plugin.register(cfg)
    assert not cfg["sample_packing"] and not cfg["pad_to_sequence_len"]
    assert cfg["attn_implementation"] == "sdpa" and "flash_attention" not in cfg
    assert cfg["lora_qkv_kernel"] is True and cfg["lora_mlp_kernel"] is False


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"sample_packing": False}, "sample_packing: false contradicts the nopad plugin"),
     ({"rl": "dpo"}, "rl: the nopad plugin is for supervised fine-tuning"),
     ({"pretraining_dataset": ["c4"]}, "pretraining_dataset does not apply to packs"),
     ({"context_parallel_size": 2}, "context_parallel_size does not apply to packs"),
     ({"nopad_eval_output": "a.jsonl"}, "nopad_eval_output has no effect without nopad_eval_data")],
)  # fmt: skip
def test_settings_of_axolotl_without_effect_are_refused(plugin, setting, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plugin.register(setting)
    plugin.register({"context_parallel_size": 1})


def test_steps_are_those_of_packs_not_of_axolotl_s_batches(plugin):
    names = ("max_steps", "warmup_steps", "warmup_ratio", "curriculum_sampling",
             "sample_packing_sequentially")  # fmt: skip
    cfg = SimpleNamespace(**dict.fromkeys(names))
    args = plugin.get_training_args(cfg)
    assert (args["max_steps"], args["warmup_steps"]) == (-1, 0.03)
    assert "train_sampling_strategy" not in args
    cfg.max_steps, cfg.warmup_steps, cfg.curriculum_sampling = 7, 2, True
    args = plugin.get_training_args(cfg)
    assert args["max_steps"] == 7 and "warmup_steps" not in args
    assert args["train_sampling_strategy"] == "sequential"
