"""Print the files of the package that run on a path, as JSON: `trace_path.py loss|completion`."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

import nopad
from nopad import Engine, PackedCollator, PackedDataset, SamplingParams
from nopad.trainer import attach_loss
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Tokenizer, LlamaConfig

ROOT = Path(nopad.__file__).resolve().parent
TEXTS = [f"a short text {'and more ' * (i % 7)}" for i in range(60)]


def model_and_tokenizer():
    tokenizer = GPT2Tokenizer().train_new_from_iterator(TEXTS, 300)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **shape)
    return AutoModelForCausalLM.from_config(config, attn_implementation="nopad"), tokenizer


def loss(folder: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    attach_loss(model)
    data = PackedDataset(str(rows), tokenizer=tokenizer, budget=64)
    batches = DataLoader(data, batch_size=2, collate_fn=PackedCollator())
    model(**next(iter(batches))).loss.backward()


def completion(folder: Path) -> None:
    engine = Engine(*model_and_tokenizer())
    (done,) = engine.generate(["a short"], SamplingParams(max_tokens=4, temperature=1.0, seed=1))
    assert done.text is not None


def main(path: str) -> None:
    called: set[str] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<module>":
            called.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(note)
        threading.setprofile(note)
        {"loss": loss, "completion": completion}[path](Path(folder))
        sys.setprofile(None)
    files = {Path(name).resolve() for name in called if not name.startswith("<")}
    inside = (file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT))
    hidden = ("tests", "docs", "benchmarks", ".")
    names = {file.as_posix() for file in inside if not file.as_posix().startswith(hidden)}
    print(json.dumps(sorted(name for name in names if not name.endswith("__init__.py"))))


if __name__ == "__main__":
    main(sys.argv[1])
