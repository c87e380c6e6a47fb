"""Labels of documents travel with them: through sources, packs, resumes and copies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from nopad.packing import PackedDataset, Sample
from nopad.packing.sources import TokenArray

ROWS = [{"input_ids": [n + 1] * (n % 5 + 1), "label": n % 7} for n in range(40)]
TOKENS = [{**row, "label": list(range(len(row["input_ids"])))} for row in ROWS]


def as_file(rows, path):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def as_dataset(rows, path):
    import datasets

    return datasets.Dataset.from_list(rows)


SOURCES = {
    "list": lambda rows, path: rows,
    "stream": lambda rows, path: lambda: iter(rows),
    "jsonl": as_file,
    "dataset": as_dataset,
    "samples": lambda rows, path: [
        Sample(np.array(row["input_ids"]), target=row["label"]) for row in rows
    ],
}


def labels(pack) -> list:
    return [] if pack.targets is None else [np.asarray(target).tolist() for target in pack.targets]


@pytest.mark.parametrize("source", SOURCES)
def test_every_document_keeps_its_label(source, tmp_path):
    data = PackedDataset(SOURCES[source](ROWS, tmp_path / "a.jsonl"), budget=16,
                         label_column="label")  # fmt: skip
    packs, seen = list(data), []
    for pack in packs:
        numbers = [int(pack.tokens[start]) - 1 for start in pack.cu_seqlens[:-1]]
        assert labels(pack) == [number % 7 for number in numbers]
        seen += numbers
    assert sorted(seen) == list(range(40)) and data.is_labelled


@pytest.mark.parametrize("source", ["list", "stream"])
def test_a_resumed_run_has_the_labels_of_an_uninterrupted_one(source, tmp_path):
    def make():
        made = SOURCES[source](TOKENS, tmp_path)
        return PackedDataset(made, budget=16, label_column="label", overflow="truncate",
                             max_length=4)  # fmt: skip

    whole = [labels(pack) for pack in make()]
    assert max(len(label) for pack in whole for label in pack) == 4
    first, rest = make(), make()
    reader = iter(first)
    before = [labels(next(reader)) for _ in range(3)]
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [labels(pack) for pack in rest] == whole
    with pytest.raises(ValueError, match="label_column"):
        PackedDataset(ROWS, budget=16, overflow="truncate", max_length=4).load_state_dict(
            first.state_dict()
        )


def test_other_labels_are_other_data():
    first = PackedDataset(ROWS, budget=16, label_column="label")
    other = PackedDataset([{**r, "label": 1} for r in ROWS], budget=16, label_column="label")
    with pytest.raises(ValueError, match="other data"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("row", "settings", "told"),
    [
        ({"input_ids": [5, 6]}, {}, "row 0: the row has no 'label', which label_column= names"),
        ({"input_ids": [5], "label": "bad"}, {}, "label is 'bad': pass the number of a class"),
        ({"input_ids": [5], "label": float("nan")}, {}, "label is nan: a score is a finite"),
        ({"input_ids": [5], "label": [1, 2]}, {}, "label has 2 integers, but the document 1"),
        ({"input_ids": [5] * 9, "label": 1}, {}, "row 0 has 9 tokens, at most 8 are allowed"),
        ({"input_ids": [5, 6], "label": 1, "token_type_ids": [0, 1]}, {}, "of sentence pairs"),
        ({"input_ids": [5], "label": 1}, {"strategy": "concat"}, "concat.*splits documents"),
        ({"input_ids": [5], "label": 1}, {"pad_to_multiple_of": 2}, "pads documents"),
        ({"input_ids": [5], "label": 1}, {"label_column": "text"}, "name of the column of labels"),
    ],
)
def test_labels_that_cannot_be_used_are_named(row, settings, told):
    with pytest.raises(ValueError, match=told):
        list(PackedDataset([row], **{"budget": 8, "label_column": "label", **settings}))


def test_labels_stay_with_their_documents_if_others_are_skipped():
    samples = [Sample(np.array(ids), target=ids[-1]) for ids in ([5, 6], [99, 7], [8, 9])]
    source = TokenArray.of(samples)
    data = PackedDataset(source, budget=8, vocab_size=50, on_error="skip", shuffle=False)
    (pack,) = data
    assert pack.tokens[pack.cu_seqlens[1:] - 1].tolist() == pack.targets == [6, 9]
