"""The smallest data, model and tokenizer that a recipe runs on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path


def train(recipe: str, argv: list) -> None:
    """Run a recipe in this process; its errors are raised."""
    from nopad.recipes.support.run_dir import RunDir

    module = importlib.import_module(f"nopad.recipes.{recipe}")
    args = module.parse_args([*map(str, argv)])
    module.train(args, RunDir(recipe, args))


def status(recipe: str, argv: list) -> int:
    """Run a recipe in this process; return its exit status."""
    from nopad.recipes.support.run_recipe import exit_status

    module = importlib.import_module(f"nopad.recipes.{recipe}")
    return exit_status(recipe, module.parse_args, module.train, [*map(str, argv)])


def documents(folder: Path, count: int = 300) -> Path:
    """Write token ids, so that no text has to be encoded."""
    rows = [{"input_ids": [(7 * i + j) % 97 + 1 for j in range(5 + i % 40)]} for i in range(count)]
    return _write_rows(folder / "ids.jsonl", rows)


def texts(folder: Path, count: int = 60, words: int = 3) -> Path:
    """Write texts of `words` words and up to 8 more; of 90, some can be held out."""
    lengths = [words + i % 9 for i in range(count)]
    rows = [
        {"text": " ".join(f"w{(i + j) % 90}" for j in range(length))}
        for i, length in enumerate(lengths)
    ]
    return _write_rows(folder / "texts.jsonl", rows)


def chats(folder: Path, count: int = 80) -> Path:
    rows = [
        {"messages": [
            {"role": "user", "content": f"w{i % 90} w{i % 7}"},
            {"role": "assistant", "content": f"w{i % 7} w{i % 5}"},
        ]}
        for i in range(count)
    ]  # fmt: skip
    return _write_rows(folder / "chats.jsonl", rows)


def model(folder: Path, **changes) -> Path:
    """Write a config; its weights are new in every run."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = folder / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads, **changes}))
    return path


def checkpoint(folder: Path, **changes) -> Path:
    """Write a checkpoint with weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model(folder, **changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


def tokenizer(folder: Path, eos: str | None = "<eos>", template: bool = True) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(100)} | {"<unk>": 100, "<eos>": 101}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, unk_token="<unk>")
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}"
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def _write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
