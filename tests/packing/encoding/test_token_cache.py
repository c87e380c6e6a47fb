"""Tokens on disk: read where nothing changed, never where anything did."""

from __future__ import annotations

import json
import multiprocessing
import os
from itertools import islice

import datasets
import pytest
from char_words import char_tokenizer
from nopad.packing import PackedDataset
from nopad.packing.encoding import Encoder, shard_job, token_cache

ROWS = [{"text": "abcde"[: n % 5 + 1] * (n % 7 + 1)} for n in range(40)]


@pytest.fixture
def encoded(monkeypatch):
    """The rows that were tokenized."""
    rows, one_by_one, texts = [], Encoder.encode, shard_job.encode_texts
    monkeypatch.setattr(Encoder, "encode", lambda self, x: rows.extend(x) or one_by_one(self, x))
    monkeypatch.setattr(
        shard_job, "encode_texts", lambda e, x, check: rows.extend(x) or texts(e, x, check)
    )
    return rows


@pytest.fixture
def pack(tmp_path, encoded):
    """Open a source; return the data, and whether rows were tokenized."""

    def packed(source, **settings):
        encoded.clear()
        options = {"tokenizer": char_tokenizer(), "cache_dir": tmp_path / "cache", "budget": 64}
        data = PackedDataset(source, **{**options, **settings})
        return data, bool(encoded)

    return packed


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(data: PackedDataset) -> list:
    return [(pack.tokens.tolist(), pack.labels.tolist()) for pack in data]


@pytest.mark.parametrize("kind", ["jsonl", "dataset", "prompts"])
def test_the_second_time_nothing_is_tokenized_and_the_packs_are_the_same(tmp_path, pack, kind):
    rows = ROWS
    if kind == "prompts":
        rows = [{"prompt": row["text"], "completion": "ab"} for row in ROWS]
    source = write(tmp_path / "rows.jsonl", rows)
    source = datasets.Dataset.from_list(rows) if kind == "dataset" else source
    plain, _ = pack(source, cache_dir=False)
    first, tokenized = pack(source)
    assert tokenized and "cached in" in first.token_cache.messages[0]
    second, tokenized = pack(source)
    assert not tokenized and "read from" in second.token_cache.messages[0]
    assert second.fingerprint == first.fingerprint == plain.fingerprint
    wanted = contents(first)
    assert list(islice(plain, 1))
    second.load_state_dict(plain.state_dict())
    assert contents(second) == wanted[1:]
    assert len(os.listdir(tmp_path / "cache")) == 1


def test_whatever_changes_is_tokenized_again(tmp_path, pack):
    path, tokenizer = write(tmp_path / "rows.jsonl"), char_tokenizer()
    assert pack(path)[1] and not pack(path)[1]
    tokenizer.chat_template = "{{ messages }}"
    other = char_tokenizer("abcdefgx")
    for settings in ({"tokenizer": tokenizer}, {"tokenizer": other}, {"add_eos": False},
                     {"on_error": "skip"}, {"overflow": "error"}, {"vocab_size": 99}):  # fmt: skip
        assert pack(path, **settings)[1], settings
        assert not pack(path, **settings)[1], settings
    status = path.stat()
    write(path, [{"text": "ba" if row["text"] == "ab" else row["text"]} for row in ROWS])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as large and as old as before
    assert path.stat().st_size == status.st_size and pack(path)[1]
    for settings in ({"budget": 32}, {"seed": 5}, {"max_length": 8}):  # these change the packs only
        assert not pack(path, **settings)[1], settings


def test_tokens_of_other_code_are_not_read(tmp_path, pack, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    pack(path)
    monkeypatch.setattr(token_cache, "_code_hash", lambda: "another version")
    assert pack(path)[1]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "entry"])
def test_a_damaged_entry_is_tokenized_again_and_replaced(tmp_path, pack, damage):
    path = write(tmp_path / "rows.jsonl")
    wanted = contents(pack(path)[0])
    (place,) = (tmp_path / "cache").iterdir()
    tokens = place / "00000.bin"
    data = bytearray(tokens.read_bytes())
    data[7] ^= 1
    if damage == "missing":
        tokens.unlink()
    elif damage == "entry":
        (place / "manifest.json").write_text("{")
    else:
        tokens.write_bytes(data if damage == "flipped" else data[:-1])
    again, tokenized = pack(path)
    assert tokenized and contents(again) == wanted
    assert "damaged" in again.token_cache.messages[0]
    assert not pack(path)[1]


def test_of_processes_that_need_one_entry_one_writes_it_and_the_others_read_it(tmp_path, pack):
    path, fork = write(tmp_path / "rows.jsonl"), multiprocessing.get_context("fork")
    start, results = fork.Barrier(3), fork.SimpleQueue()

    def need():
        start.wait()
        data, tokenized = pack(path)
        results.put((tokenized, contents(data)))

    processes = [fork.Process(target=need) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(tokenized for tokenized, _ in found) == [False, False, True]
    assert found[0][1] == found[1][1] == found[2][1] == contents(pack(path, cache_dir=False)[0])


def test_rows_that_were_skipped_are_told_again(tmp_path, pack):
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"no": 1}, {"text": ""}])
    told = [pack(path, on_error="skip")[0].skipped for _ in range(2)]
    assert told[0] == told[1] and told[0].rows == 2
    assert told[1].reasons[0].startswith("rows.jsonl, line 41")


def test_what_cannot_be_identified_is_not_cached(tmp_path, pack):
    path, rows = write(tmp_path / "rows.jsonl"), datasets.Dataset.from_list(ROWS)
    transformed = rows.with_transform(lambda batch: batch)
    for source, settings in (
        (path, {"tokenizer": lambda text: [1, 2]}), (path, {"format": lambda row: row}),
        (ROWS, {}), (lambda: iter(ROWS), {"pretokenize": True}), (transformed, {}),
        (path, {"cache_dir": False}), (path, {"cache_dir": None}),
    ):  # fmt: skip
        for _ in range(2):
            assert pack(source, **settings)[1]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="cache_dir=3: pass a folder, or False for no cache"):
        pack(path, cache_dir=3)


def test_large_data_is_cached_and_a_full_disk_is_no_error(tmp_path, pack, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(token_cache, "MIN_BYTES", path.stat().st_size)
    pack(path, cache_dir=None)
    assert len(os.listdir(tmp_path / "hf" / "nopad" / "tokens")) == 1
    (tmp_path / "file").write_text("")
    data, tokenized = pack(path, cache_dir=tmp_path / "file" / "below")
    assert tokenized and "are not cached" in data.token_cache.messages[0]


def test_a_template_that_prints_the_date_is_used_for_a_day(tmp_path, pack, monkeypatch):
    path, tokenizer = write(tmp_path / "rows.jsonl"), char_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d') }}"
    assert pack(path, tokenizer=tokenizer)[1] and not pack(path, tokenizer=tokenizer)[1]

    class Tomorrow:
        @staticmethod
        def today():
            return "tomorrow"

    monkeypatch.setattr(token_cache, "date", Tomorrow)
    assert pack(path, tokenizer=tokenizer)[1]
