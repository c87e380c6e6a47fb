"""Run the Python blocks of a page as a reader would: in order, with a model and data at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n\n?)?^( *)```python\n(.*?)^ *```$", re.S | re.M)
TAB = re.compile(r'^=== "', re.M)
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.S | re.M)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def python_blocks(text: str) -> list[tuple[int | None, str]]:
    """The Python blocks of a page that are not marked as `<!-- not run: REASON -->`.

    Each with the number of the tab it is in, or None.

    >>> python_blocks("```python\\na = 1\\n```\\n<!-- not run: slow -->\\n```python\\nb\\n```")
    [(None, 'a = 1\\n')]
    """
    blocks = []
    for found in BLOCK.finditer(text):
        is_marked, indent, code = found.groups()
        if not is_marked:
            tab = len(TAB.findall(text[: found.start()])) if indent else None
            blocks.append((tab, re.sub(rf"^{indent}", "", code, flags=re.M)))
    return blocks


def run_blocks(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run a page's blocks one after the other, for two steps each; return the names they define.

    A tab begins with the names from before the tabs: its reader has not read the others. Files
    that the page shows with a title are written first.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content, encoding="utf-8")
    last_tab, names_in_tab = None, names
    for number, (tab, block) in enumerate(python_blocks(text)):
        if tab != last_tab:
            last_tab, names_in_tab = tab, names if tab is None else dict(names)
        code = re.sub(r"\bmax_steps=\d+", "max_steps=2", block)
        exec(compile(code, f"{page.name}, block {number + 1}", "exec"), names_in_tab)
    return names


def what_a_reader_has(folder: Path) -> dict[str, Any]:
    """A small model with its tokenizer, and files of every form, in the working directory."""
    import nopad.attention  # noqa: F401  registers attn_implementation="nopad"
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {chr(number): number - 32 for number in range(32, 127)}
    vocabulary = {**letters, "</s>": 95, "<u>": 96, "\n": 97}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<u>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<u>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=98, **shape, **heads))
    model.set_attn_implementation("nopad")
    write_data(folder)
    return {"__name__": "__main__", "model": model, "tokenizer": tokenizer}


def write_data(folder: Path) -> None:
    """Write the files that pages name."""
    texts = [f"document {number} says " + "word " * (number % 7) for number in range(60)]
    asked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    rows = {
        "corpus.jsonl": [{"text": text} for text in texts],
        "code.jsonl": [{"text": f"def f{number}(): return {number}"} for number in range(40)],
        "chats.jsonl": [{"messages": asked}] * 30,
        "pairs.jsonl": [{"prompt": "2 + 2 =", "completion": " 4"}] * 30,
    }
    for name, entries in rows.items():
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / name).write_text(lines, encoding="utf-8")
