"""The README's examples run as they stand, on a tiny model; its list of commands is whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


class Module(pl.LightningModule):
    def __init__(self, model: LlamaForCausalLM):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def what_a_reader_has(folder: Path) -> dict:
    """A model, its tokenizer and optimizer, and data: what the examples take for granted."""
    letters = {chr(number): number - 32 for number in range(32, 127)}
    inner = Tokenizer(
        models.BPE(vocab={**letters, "<e>": 95, "<u>": 96}, merges=[], unk_token="<u>")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>", unk_token="<u>")
    rows = [{"text": f"document {number} says " + "word " * (number % 7)} for number in range(60)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in rows]
    given = {"tokenizer": tokenizer, "model": model, "optimizer": optimizer, "dataset": dataset}
    given |= {"module": Module(model), "pl": pl, "TrainingArguments": TrainingArguments}
    return {**given, "DataLoader": DataLoader}


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    names = what_a_reader_has(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    after = names["model"].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing trained"
    assert next(iter(names["loader"]))["input_ids"].shape[0] == 1
    assert names["outputs"][0].finish_reason in ("stop", "length")
    ((four, five),) = names["scores"]
    assert four.error is None and five.error is None
    capsys.readouterr()


def test_every_command_is_in_the_readme():
    told = subprocess.run([sys.executable, "-m", "nopad", "--help"], capture_output=True, text=True)
    assert told.returncode == 0
    commands = re.findall(r"^  (\w+) ", told.stdout, re.MULTILINE)
    assert len(commands) >= 4
    assert [name for name in commands if f"nopad {name} " not in README] == []
