"""The documented script on LLaMA-Factory's data and model: its loss is that of rows one by one.

It needs LLaMA-Factory, whose pins differ from ours: `.ci/llamafactory` runs it in an environment of
its own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_inputs import write_inputs
from transformers import AutoModelForCausalLM

LACKS = importlib.util.find_spec("llamafactory") is None
needs_llamafactory = pytest.mark.skipif(LACKS, reason="its pins differ: run .ci/llamafactory")
PAGE = Path(__file__).parents[2] / "docs/trainers/axolotl.md"
SETTINGS = {
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_target": "all",
    "dataset": "rows", "template": "default", "cutoff_len": 256, "num_train_epochs": 1,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 100, "logging_steps": 1,
    "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "overwrite_output_dir": True,
}  # fmt: skip
"""The keys of its example of LoRA (examples/train_lora/qwen3_lora_sft.yaml); one optimizer step."""


def script() -> str:
    """The program of the page."""
    return PAGE.read_text().split("```python\n# packed.py: ")[1].split("\n", 1)[1].split("```")[0]


def run_script(tmp_path, monkeypatch, **changes) -> dict:
    """Run the program of the page; return its variables."""
    import yaml

    write_inputs(tmp_path)
    info = {"rows": {"file_name": "alpaca.jsonl"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    paths = {"model_name_or_path": str(tmp_path / "model"), "dataset_dir": str(tmp_path),
             "output_dir": str(tmp_path / "out")}  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(SETTINGS | paths | changes))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["packed.py", "train.yaml"])
    program = {"__name__": "__main__"}
    exec(compile(script(), "packed.py", "exec"), program)
    return program


@needs_llamafactory
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stage": "dpo"}, "set stage: sft"),
        ({"packing": True}, "remove packing and neat_packing"),
        ({"neat_packing": True}, "remove packing and neat_packing"),
        ({"use_dft_loss": True}, "own trainer has use_dft_loss: remove it"),
        ({"loraplus_lr_ratio": 16.0}, "own trainer has loraplus_lr_ratio: remove it"),
    ],
    ids=str,
)
def test_the_documented_script_stops_at_what_it_does_not_do(tmp_path, monkeypatch, changes, told):
    with pytest.raises(SystemExit, match=told):
        run_script(tmp_path, monkeypatch, **changes)


@needs_llamafactory
def test_the_documented_script_trains_on_packs_of_its_rows(tmp_path, monkeypatch):
    from peft import PeftModel

    program = run_script(tmp_path, monkeypatch, per_device_eval_batch_size=2)
    trainer = program["trainer"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    total, count = 0.0, 0
    for row in program["data"]["train_dataset"]:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        number = int((labels[:, 1:] != -100).sum())
        total += base(input_ids=ids, labels=labels).loss.item() * number
        count += number
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 1 and count > 500
    assert losses[0] == pytest.approx(total / count, rel=1e-4)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert any(p.abs().sum() > 0 for n, p in adapted.named_parameters() if "lora_B" in n)
