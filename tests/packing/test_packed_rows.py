"""Rows that are packed already are cut into their documents, or refused: none leaks."""

import json

import datasets
import numpy as np
import pytest
from nopad.collators import PackedCollator, PaddedCollator
from nopad.packing import PackedDataset
from nopad.packing.document_starts import BOUNDARY_COLUMNS, inner_starts

IDS = [1, 2, 3, 4, 5, 6]
COLUMNS = {
    "seq_lengths": [3, 1, 2],
    "cu_seqlens": [0, 3, 4, 6],
    "cu_seq_lens_q": [0, 3, 4, 6],
    "position_ids": [0, 1, 2, 0, 0, 1],
    "attention_mask": [1, 1, 1, 2, 3, 3],
    "seq_idx": [0, 0, 0, 1, 2, 2],
    "segment_ids": [1, 1, 1, 2, 1, 1],
    "document_ids": [7, 7, 7, 9, 8, 8],
}
ONE_DOCUMENT = {
    "seq_lengths": [6],
    "cu_seqlens": [0, 6],
    "position_ids": IDS,
    "attention_mask": [1] * 6,
    "seq_idx": [4] * 6,
    "document_ids": 12,
} | {"position_ids": [0, 1, 2, 3, 4, 5]}
DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def documents(packs):
    return [p.tolist() for pack in packs for p in np.split(pack.tokens, pack.cu_seqlens[1:-1])]


def read(source):
    options = {"budget": 64, "shuffle": False, "strategy": "sequential"}
    return documents(PackedDataset(source, **options))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_dataset_of_packed_rows_is_cut_into_its_documents(name):
    other = {"seq_lengths": [2], "cu_seqlens": [0, 2], "cu_seq_lens_q": [0, 2]}
    plain = other.get(name, [0, 1] if name == "position_ids" else [1, 1])
    columns = {"input_ids": [[8, 9], IDS, [8, 9]], name: [plain, COLUMNS[name], plain]}
    assert read(datasets.Dataset.from_dict(columns)) == [[8, 9], *DOCUMENTS, [8, 9]]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_packed_row_anywhere_else_is_refused(tmp_path, name):
    rows = [{"input_ids": [8, 9]}, {"input_ids": IDS, name: COLUMNS[name]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (rows, lambda: iter(rows), path):
        with pytest.raises(ValueError, match=f"packed already, 3 documents by .*{name}"):
            read(source)
    stream = datasets.Dataset.from_list(rows[1:]).to_iterable_dataset()
    with pytest.raises(ValueError, match="packed already, 3 documents"):
        read(stream)


@pytest.mark.parametrize("name", ONE_DOCUMENT)
def test_columns_that_name_one_document_are_accepted(name):
    row = {"input_ids": IDS, name: ONE_DOCUMENT[name]}
    assert read([row]) == read(datasets.Dataset.from_list([row])) == [IDS]
    assert PackedCollator()([row])["cu_seq_lens_q"].tolist() == [0, 6]


@pytest.mark.parametrize("name", COLUMNS)
def test_the_collators_cut_packed_rows(name):
    row = {"input_ids": IDS, "labels": [-100, 2, 3, 4, 5, 6], name: COLUMNS[name]}
    batch = PackedCollator()([row, {"input_ids": [8, 9]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, 6, -100, 9]]
    assert PaddedCollator()([row])["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]


@pytest.mark.parametrize(
    "column",
    [
        {"seq_lengths": [3, 2]},
        {"seq_lengths": [6, 0]},
        {"seq_lengths": [7, -1]},
        {"cu_seqlens": [0, 3]},
        {"cu_seqlens": [1, 6]},
        {"cu_seqlens": [0, 4, 3, 6]},
        {"cu_seqlens": []},
        {"position_ids": [1, 2, 3, 4, 5, 6]},
        {"position_ids": [0, 1, 3, 4, 5, 6]},
        {"position_ids": [0, 1, 2, 1, 2, 3]},
        {"position_ids": [0, 1, 2]},
        {"attention_mask": [1, 1, 1, 2, 2, 0]},
        {"attention_mask": [1, 1]},
        {"seq_idx": [0, 0, 1]},
        {"seq_lengths": [3, 3], "position_ids": [0, 1, 0, 1, 2, 3]},
    ],
)
def test_boundaries_that_do_not_fit_their_row_are_refused(column):
    row = {"input_ids": IDS, **column}
    name = next(iter(column))
    for source in ([row], datasets.Dataset.from_list([row])):
        with pytest.raises(ValueError, match=name):
            read(source)
    with pytest.raises(ValueError, match=name):
        PackedCollator()([row])


def test_padding_is_found_in_any_row_of_a_dataset():
    masks = [[1, 1]] * 3000
    masks[2500] = [1, 0]
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 3000, "attention_mask": masks})
    with pytest.raises(ValueError, match="attention_mask contains 0"):
        PackedDataset(data, budget=64)


def test_rows_that_are_null_or_empty_stay_in_their_place():
    columns = {"input_ids": [[1, 2], [], IDS], "seq_lengths": [[1, 1], [], [3, 1, 2]]}
    data = datasets.Dataset.from_dict(columns)
    packed = PackedDataset(data, budget=64, shuffle=False, strategy="sequential", on_error="skip")
    assert documents(packed) == [[1], [2], *DOCUMENTS] and packed.skipped.rows == 1


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_what_trl_packed_is_the_same_documents(tools, strategy):
    trl = pytest.importorskip("trl", reason="this is about TRL's packs")
    rows = [row.tolist() for row in tools.documents(60, longest=30)]
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    packed = trl.pack_dataset(data, seq_length=32, strategy=strategy)
    assert len(packed) < len(rows) and "seq_lengths" in packed.column_names
    assert sorted(read(packed)) == sorted(rows)


def test_every_boundary_column_cuts_many_random_rows_alike():
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 9, rng.integers(1, 5)) for _ in range(50)]
    lengths, counts = np.array([row.sum() for row in rows]), np.array(list(map(len, rows)))
    flat = np.concatenate(rows)
    begins = np.cumsum(flat) - flat
    expected = np.setdiff1d(begins, np.cumsum(lengths) - lengths)
    numbers = np.concatenate([np.repeat(np.arange(1, len(row) + 1), row) for row in rows])
    forms = {
        "seq_lengths": (flat, counts),
        "cu_seqlens": (
            np.concatenate([np.concatenate([[0], np.cumsum(row)]) for row in rows]), counts + 1
        ),
        "position_ids": (np.concatenate([np.arange(n) for n in flat]), lengths),
        "attention_mask": (numbers, lengths),
    }  # fmt: skip
    assert forms.keys() <= BOUNDARY_COLUMNS
    for name, column in forms.items():
        assert np.array_equal(inner_starts({name: column}, lengths), expected), name
    assert np.array_equal(inner_starts(forms, lengths), expected)
