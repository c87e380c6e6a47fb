"""Hostile documents: each is rejected by name or skipped and counted, the others are unaffected."""

import json
import os
import random
from contextlib import suppress

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from char_tokenizer import tokenize_chars
from nopad.packing import PackedDataset, Packer, Sample
from nopad.packing.encoding import Encoder
from nopad.packing.sources import RowError

VOCAB = 512


IDS = {
    "empty ids": [],
    "NaN": [1, float("nan")],
    "infinity": [1, float("inf")],
    "a fraction": [1, 1.5],
    "a whole float": [1.0, 2.0],
    "bool": [True, False],
    "a bool among integers": [1, True, 2],
    "text among ids": [1, "2"],
    "ids as text": "1 2 3",
    "None": None,
    "None among ids": [1, None],
    "two dimensions": [[1, 2], [3, 4]],
    "ragged": [[1], [2, 3]],
    "a number": 7,
    "a dict": {"a": 1},
    "negative": [1, -1],
    "the vocabulary's size": [1, VOCAB],
    "2^63": [1, 2**63],
    "2^64": [1, 2**64],
    "float array": np.array([1.0, 2.0]),
    "bool array": np.array([True, False]),
    "object array": np.array([1, "a"], object),
    "large unsigned": np.array([2**63 + 1], np.uint64),
    "complex": np.array([1j]),
}
ROWS = {
    **{f"input_ids: {name}": {"input_ids": ids} for name, ids in IDS.items()},
    "labels shorter": {"input_ids": [1, 2, 3], "labels": [1, 2]},
    "labels longer": {"input_ids": [1, 2], "labels": [1, 2, 3]},
    "labels NaN": {"input_ids": [1, 2], "labels": [1, float("nan")]},
    "labels fractions": {"input_ids": [1, 2], "labels": [1, 2.5]},
    "labels below -100": {"input_ids": [1, 2], "labels": [1, -101]},
    "labels beyond the vocabulary": {"input_ids": [1, 2], "labels": [1, VOCAB]},
    "empty text": {"text": ""},
    "text None": {"text": None},
    "text a number": {"text": 5},
    "text bytes": {"text": b"abc"},
    "lone surrogate": {"text": "a\ud800b"},
    "no known column": {"content": "abc"},
    "a row that is a number": 5,
    "a row that is None": None,
    "messages no list": {"messages": "hi"},
    "messages empty": {"messages": []},
    "messages without assistant": {"messages": [{"role": "user", "content": "hi"}]},
    "message without role": {"messages": [{"content": "hi"}]},
    "prompt without text": {"prompt": None, "completion": "b"},
    "completion empty": {"prompt": "a", "completion": ""},
}
GOOD = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_bad_row_is_named_or_left_out_and_its_neighbours_are_packed(name, pretokenize):
    source = [*GOOD[:2], ROWS[name], *GOOD[2:]]
    options = {"budget": 8, "pool": 2, "shuffle": False, "pretokenize": pretokenize, "shards": 1}
    options |= {"tokenizer": tokenize_chars, "vocab_size": VOCAB, "add_eos": False}
    with pytest.raises(ValueError, match=r"list, row 2: .*on_error"):
        list(PackedDataset(source, **options))
    data = PackedDataset(source, on_error="skip", **options)
    tokens = np.concatenate([pack.tokens for pack in data]).tolist()
    assert sorted(tokens) == list(range(1, 11))
    report = data.report()
    assert report["skipped"]["rows"] == 1 and "row 2" in report["skipped"]["reasons"][0]
    assert "hi" not in report["skipped"]["reasons"][0].split()


def test_there_are_at_least_25_classes_of_hostile_documents():
    assert len(ROWS) + len(LINES) >= 25
    print(f"{len(ROWS)} classes of rows and {len(LINES)} of lines x (raise, skip)")


LINES = {
    "torn": b'{"input_ids": [1, 2',
    "no JSON": b"hello",
    "NaN": b'{"input_ids": [1, NaN]}',
    "infinity": b'{"input_ids": [1, -Infinity]}',
    "a key twice": b'{"input_ids": [1], "input_ids": [2]}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "a list": b"[1, 2.5]",
    "a number": b"17",
    "null": b"null",
    "NUL": b"\x00\x00\x00",
    "deep": b"[" * 100 + b"]" * 100,
    "very deep": b"[" * 100_000,
    "an escaped surrogate": b'{"text": "\\ud800"}',
    "two rows": b'{"input_ids": [1]} {"input_ids": [2]}',
    "a huge number": b'{"input_ids": [' + b"9" * 5000 + b"]}",
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named_or_left_out_and_its_neighbours_are_packed(tmp_path, name, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    good = [json.dumps({"input_ids": ids}).encode() for ids in GOOD]
    data = b"\n".join([*good[:2], LINES[name], *good[2:]]) + b"\n"
    path.write_bytes(pa.compress(data, codec="gzip", asbytes=True) if suffix else data)
    options = {"budget": 8, "pool": 2, "shuffle": False, "shards": 1, "pretokenize": False}
    options |= {"tokenizer": tokenize_chars, "vocab_size": VOCAB, "add_eos": False}
    with pytest.raises(ValueError, match=r"rows\.jsonl(\.gz)?, line 3: .*on_error"):
        list(PackedDataset(path, **options))
    packed = PackedDataset(path, on_error="skip", **options)
    tokens = np.concatenate([pack.tokens for pack in packed]).tolist()
    assert sorted(tokens) == list(range(1, 11))
    assert packed.report()["skipped"]["rows"] == 1


def test_samples_before_a_bad_row_are_delivered_before_it_is_raised(jsonl):
    rows = [[i, i, i, i] for i in range(1, 200)]
    path = jsonl([*rows[:150], [], *rows[150:]])
    data = PackedDataset(path, budget=8, pool=4, shuffle=False, shards=1, pretokenize=False)
    seen = []
    with pytest.raises(RowError, match="line 151"):
        for pack in data:
            seen += pack.tokens[::4].tolist()
    assert len(seen) >= 150 - 4 and set(seen) <= set(range(1, 151))


def damaged_parquet(path, where):
    table = pa.table({"input_ids": [[i] * 50 for i in range(400)]})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    if where == "truncated":
        data = data[: len(data) // 2]
    else:
        meta = pq.read_metadata(path).row_group(1).column(0)
        begin = meta.data_page_offset
        data[begin : begin + 12] = b"\xff" * 12
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("where", ["truncated", "page"])
def test_a_torn_parquet_file_or_page_is_named_or_left_out(tmp_path, where):
    path = damaged_parquet(tmp_path / "rows.parquet", where)
    options = {"budget": 100, "pool": 2, "shuffle": False, "shards": 1, "pretokenize": False}
    with pytest.raises(ValueError, match=r"rows\.parquet, row .*on_error"):
        list(PackedDataset(path, **options))
    packed = PackedDataset(path, on_error="skip", **options)
    if where == "truncated":
        with pytest.raises(ValueError, match="nothing to pack"):
            list(packed)
    else:
        rows = {int(t) for pack in packed for t in pack.tokens}
        assert rows == set(range(400)) - set(range(100, 200))
    assert packed.report()["skipped"]["rows"] == 1


@pytest.mark.parametrize("codec, suffix", [("gzip", "gz"), ("zstd", "zst")])
def test_a_torn_compressed_file_is_named_and_every_row_before_it_is_packed(tmp_path, codec, suffix):
    path = tmp_path / f"rows.jsonl.{suffix}"
    text = b"".join(json.dumps({"input_ids": [i] * 30}).encode() + b"\n" for i in range(5000))
    data = pa.compress(text, codec=codec, asbytes=True)
    path.write_bytes(data[: len(data) * 2 // 3])
    whole = _readable(path, codec).count(b"\n")
    options = {"budget": 60, "pool": 2, "shuffle": False, "shards": 1, "pretokenize": False}
    seen = []
    with pytest.raises(ValueError, match=rf"rows\.jsonl\.{suffix}, line {whole + 1}: .* truncated"):
        for pack in PackedDataset(path, **options):
            seen += pack.tokens[::30].tolist()
    assert seen == list(range(whole)) and whole > 1000
    left_out = PackedDataset(path, **options | {"shards": 3}, on_error="skip")
    assert sorted(t for pack in left_out for t in pack.tokens[::30].tolist()) == seen


def _readable(path, codec):
    """Return all bytes of a file that can be decompressed, reading byte by byte."""
    data = []
    with pa.input_stream(str(path), compression=codec) as stream, suppress(OSError):
        while byte := stream.read(1):
            data.append(byte)
    return b"".join(data)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("inside", [0, 9])
def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path, on_error, inside):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i] * 8}) + "\n" for i in range(4000)))
    options = {"budget": 64, "pretokenize": False, "shards": 2, "shuffle": False}
    packs = iter(PackedDataset(path, **options, on_error=on_error))
    next(packs)
    lines = path.read_bytes()
    os.truncate(path, lines.rfind(b"\n", 0, len(lines) // 3) + 1 + inside)
    with pytest.raises(
        ValueError, match=r"rows\.jsonl(, line \d+: not JSON| ends before byte \d+)"
    ):
        list(packs)


def test_lines_appended_while_a_file_is_read_wait(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i] * 8}) + "\n" for i in range(1000)))
    options = {"budget": 64, "pretokenize": False, "shards": 2, "shuffle": False, "epochs": 2}
    data = PackedDataset(path, **options)
    packs = iter(data)
    seen = next(packs).tokens[::8].tolist()
    with path.open("a") as file:
        file.write('{"input_ids": [9, 9]}\n' * 2000)
    seen += [t for pack in packs for t in pack.tokens[::8].tolist()]
    assert sorted(seen) == sorted([*range(1000)] * 2)
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(path, **options).load_state_dict(data.state_dict())


def test_twenty_thousand_documents_obey_the_law_of_tokens():
    """A7: tokens in = packed + truncated + dropped + rejected, with hostile rows among them."""
    rng, encoder = random.Random(0), Encoder(tokenize_chars, vocab_size=VOCAB, add_eos=False)
    bad = [row for name, row in ROWS.items() if "messages" not in name]
    packer = Packer(256, pool=256, overflow="truncate")
    given = rejected = out = 0
    for _ in range(80):
        rows = []
        for _ in range(250):
            if rng.random() < 0.1:
                rows.append(rng.choice(bad))
            else:
                rows.append([1] * rng.choice([1, 2, 3, 50, 300]))
        samples = encoder.encode(rows)
        for row, sample in zip(rows, samples, strict=True):
            assert isinstance(sample, Sample) == isinstance(row, list)
            rejected += not isinstance(sample, Sample)
            given += len(row) if isinstance(row, list) else 0
        good = [sample for sample in samples if isinstance(sample, Sample)]
        out += sum(len(pack.tokens) for pack in packer.add(good))
    out += sum(len(pack.tokens) for pack in packer.finish())
    counts = packer.counts
    print(
        f"{given - out - counts.truncated_tokens} tokens unaccounted of {given}, "
        f"{rejected} of 20000 documents rejected"
    )
    assert given == counts.tokens == out + counts.truncated_tokens and rejected > 1000


@pytest.mark.parametrize("pretokenize", [True, False])
def test_the_wrong_type_midway_does_not_change_what_stands_before_it(pretokenize):
    rows = [[1, 2], np.array([3, 4], np.int32), [5.0, 6.0], np.array([7, 8], np.uint16)]
    data = PackedDataset(
        rows, budget=8, pool=1, shuffle=False, on_error="skip", pretokenize=pretokenize, shards=1
    )
    assert np.concatenate([pack.tokens for pack in data]).tolist() == [1, 2, 3, 4, 7, 8]


@pytest.mark.parametrize("kind", ["list", "stream", "dataset", "flat file"])
def test_an_id_beyond_any_vocabulary_is_named_where_none_is_known(tmp_path, kind):
    ids, options = [1, 2**40, 3], {"budget": 8, "rank": 0, "world_size": 1}
    source: object = [{"input_ids": ids}]
    if kind == "stream":
        options |= {"pretokenize": False, "shards": 1}
    if kind == "dataset":
        source = datasets.Dataset.from_list([{"input_ids": ids}])
    if kind == "flat file":
        np.array([*ids, 0], np.int64).tofile(tmp_path / "ids.bin")
        source, options = tmp_path / "ids.bin", options | {"dtype": "int64", "add_eos": 0}
    with pytest.raises(ValueError, match=r"1099511627776.*2147483647"):
        list(PackedDataset(source, **options))
