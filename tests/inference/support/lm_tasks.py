"""Small tasks for lm_eval, written to a folder: multiple choice, generation, whole texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

NAMES = ["Lily", "Tom", "Mia", "Ben", "Sue", "Max"]
THINGS = ["ball", "cat", "red car", "big dog", "little bird", "tree", "cake", "boat"]
PLACES = ["park", "house", "garden", "shop", "forest"]

CHOICE = """task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
num_fewshot: 1
fewshot_split: test
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITE = """task: tiny_write
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [".", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLL = """task: tiny_roll
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
DATA = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""


def documents(count: int, seed: int = 0) -> list[dict]:
    """Questions with four answers of several words, and texts of very different lengths."""
    rng = random.Random(seed)

    def sentence() -> str:
        who, what, where = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
        return f"{who} saw a {what} in the {where}."

    rows = []
    for _ in range(count):
        before = " ".join(sentence() for _ in range(rng.randint(1, 6)))
        choices = [f" a {what} in the {rng.choice(PLACES)}" for what in rng.sample(THINGS, 4)]
        rows.append(
            {
                "question": f"{before} Then {rng.choice(NAMES)} saw",
                "choices": choices,
                "answer": rng.randrange(4),
                "text": " ".join(sentence() for _ in range(rng.choice([1, 2, 3, 60]))),
            }
        )
    return rows


def write_tasks(folder: Path, count: int) -> list[str]:
    """Write data and task files; return the names of the tasks."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents(count)))
    for name, text in {"choice": CHOICE, "write": WRITE, "roll": ROLL}.items():
        (folder / f"{name}.yaml").write_text(text + DATA.format(path=data))
    return ["tiny_choice", "tiny_write", "tiny_roll"]
