"""Corpora: the same packs as the rows they were made from, the same bytes whatever wrote them."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import time
from itertools import chain, islice
from pathlib import Path

import datasets
import numpy as np
import pytest
from char_words import char_tokenizer
from flaky_server import serve
from nopad.packing import PackedDataset, tokenize
from nopad.packing.encoding import shard_job, tokenization
from nopad.packing.encoding.shard_job import write_shard
from nopad.packing.sources.token_files import MegatronWriter

FORK = multiprocessing.get_context("fork")
TEXTS = [{"text": "abcde"[: n % 5 + 1] * (n % 7 + 1)} for n in range(60)]
PROMPTS = [{"prompt": row["text"], "completion": "ab"} for row in TEXTS]
CHATS = [
    {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": "a"}]}
    for row in TEXTS
]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
BUDGET = {"budget": 64, "seed": 1}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 300)
    monkeypatch.setattr(shard_job, "RANGE_ROWS", 7)


@pytest.fixture
def tokenizer():
    tokenizer = char_tokenizer("abcdeu")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path, rows=TEXTS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(kind: str, tmp_path):
    """Return the same rows as another kind of source."""
    rows = {"prompts": PROMPTS, "chats": CHATS, "mixed": [*TEXTS[:30], *CHATS]}.get(kind, TEXTS)
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet", batch_size=11)
        return tmp_path / "rows.parquet"
    if kind == "texts":
        (tmp_path / "texts").mkdir(exist_ok=True)
        for number, row in enumerate(rows):
            (tmp_path / "texts" / f"{number:03}.txt").write_text(row["text"])
        return tmp_path / "texts"
    if kind in ("gz", "several gz", "files"):
        folder, parts = tmp_path / kind, 1 if kind == "gz" else 3
        folder.mkdir(exist_ok=True)
        for part in range(parts):
            lines = "".join(json.dumps(row) + "\n" for row in rows[part::parts])
            name, opened = ("jsonl", open) if kind == "files" else ("jsonl.gz", gzip.open)
            with opened(folder / f"{part}.{name}", "wt") as file:
                file.write(lines)
        return folder
    if kind in ("dataset", "stream"):
        made = datasets.Dataset.from_list(rows)
        return made if kind == "dataset" else made.to_iterable_dataset()
    return {"list": rows, "function": lambda: iter(rows)}.get(kind) or write(
        tmp_path / f"{kind}.jsonl", rows
    )


def contents(data: PackedDataset) -> list:
    return [
        (pack.tokens.tolist(), pack.labels.tolist(), pack.samples.tolist(), pack.index)
        for pack in data
    ]


def files(folder) -> dict:
    """Everything in a folder that readers see."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != ".lock"]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl", "files", "gz", "several gz", "parquet", "texts", "dataset", "stream", "list",
        "function", "prompts", "chats", "mixed",
    ],
)  # fmt: skip
def test_packs_of_tokens_are_those_of_the_rows(tmp_path, tokenizer, kind):
    source = source_of(kind, tmp_path)
    raw = PackedDataset(source, tokenizer=tokenizer, pretokenize=True, **BUDGET)
    manifest = tokenize(source, tmp_path / "out", tokenizer=tokenizer, processes=1)
    data = PackedDataset(tmp_path / "out", **BUDGET)
    assert len(manifest["shards"]) > 2 or kind == "gz"
    assert data.fingerprint == raw.fingerprint and data.settings == raw.settings
    wanted = contents(raw)
    assert contents(data) == wanted
    again = PackedDataset(tmp_path / "out", **BUDGET)
    start = PackedDataset(source, tokenizer=tokenizer, pretokenize=True, **BUDGET)
    assert len(list(islice(start, 2))) == 2
    again.load_state_dict(start.state_dict())  # a run on rows goes on with their tokens
    assert contents(again) == wanted[2:]


@pytest.mark.parametrize("kind", ["jsonl", "gz", "chats"])
def test_files_do_not_depend_on_processes_parts_or_interruptions(tmp_path, tokenizer, kind):
    source = source_of(kind, tmp_path)
    options = {"tokenizer": tokenizer}
    tokenize(source, tmp_path / "one", processes=1, **options)
    tokenize(source, tmp_path / "two", processes=2, **options)
    assert files(tmp_path / "two") == files(tmp_path / "one")
    if kind != "gz":
        for part in (2, 0):
            assert tokenize(source, tmp_path / "parts", part=(part, 3), **options) is None
        tokenize(source, tmp_path / "parts", **options)
        assert files(tmp_path / "parts") == files(tmp_path / "one")
        with pytest.raises(ValueError, match="part 3 of 3: the parts of 3 are 0 to 2"):
            tokenize(source, tmp_path / "other", part=(3, 3), **options)


@pytest.mark.parametrize("kilobytes, shards", [(1, 1), (5, 5), (40, 16), (400, 20)])
def test_small_sources_have_shards_for_several_cores(
    tmp_path, tokenizer, monkeypatch, kilobytes, shards
):
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 20_000)
    monkeypatch.setattr(shard_job, "MIN_RANGE_BYTES", 1000)
    row = json.dumps({"text": "a" * 87}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 10 * kilobytes)
    manifest = tokenize(tmp_path / "rows.jsonl", tmp_path / "out", tokenizer=tokenizer)
    assert len(row) == 100 and len(manifest["shards"]) == shards


@pytest.mark.parametrize("kind", ["jsonl", "gz"])
def test_processes_are_replaced_and_the_files_are_the_same(tmp_path, tokenizer, monkeypatch, kind):
    source = source_of(kind, tmp_path)
    tokenize(source, tmp_path / "one", tokenizer=tokenizer, processes=1)
    num_shards, stock, written = len(list((tmp_path / "one").glob("*.bin"))), write_shard, tmp_path

    def write_shard_of_process(job, number, *args):
        with (written / f"{os.getpid()}.shards").open("a") as file:
            file.write(f"{number}\n")
        return stock(job, number, *args)

    monkeypatch.setattr(tokenization, "write_shard", write_shard_of_process)
    monkeypatch.setattr(tokenization, "SHARDS_PER_PROCESS", 1)
    tokenize(source, tmp_path / "two", tokenizer=tokenizer, processes=2)
    assert files(tmp_path / "two") == files(tmp_path / "one")
    of_processes = [path.read_text().split() for path in tmp_path.glob("*.shards")]
    assert sorted(map(int, chain.from_iterable(of_processes))) == list(range(num_shards))
    assert max(map(len, of_processes)) <= 2  # one process may write the shards of both


def test_a_folder_that_is_not_complete_is_not_read(tmp_path, tokenizer):
    source = write(tmp_path / "rows.jsonl")
    tokenize(source, tmp_path / "out", tokenizer=tokenizer, part=(0, 2))
    with pytest.raises(ValueError, match=r"not complete: run the same `nopad tokenize` again"):
        PackedDataset(tmp_path / "out", **BUDGET)


def test_another_tokenizer_or_template_is_refused(tmp_path, tokenizer):
    for kind in ("jsonl", "chats"):
        tokenize(source_of(kind, tmp_path), tmp_path / kind, tokenizer=tokenizer)
    PackedDataset(tmp_path / "chats", tokenizer=tokenizer, **BUDGET)
    with pytest.raises(ValueError, match="another tokenizer than the one passed"):
        PackedDataset(tmp_path / "jsonl", tokenizer=char_tokenizer("abcdefg"), **BUDGET)
    tokenizer.chat_template = "other" + TEMPLATE
    PackedDataset(tmp_path / "jsonl", tokenizer=tokenizer, **BUDGET)  # text has no template
    with pytest.raises(ValueError, match="another chat template than the one passed"):
        PackedDataset(tmp_path / "chats", tokenizer=tokenizer, **BUDGET)


def test_a_folder_of_other_tokens_is_not_written_to(tmp_path, tokenizer):
    source, out = write(tmp_path / "rows.jsonl"), tmp_path / "out"
    tokenize(source, out, tokenizer=tokenizer)
    before = files(out)
    with pytest.raises(ValueError, match=r"out has other tokens \(encoded, add_eos: \d, here None"):
        tokenize(source, out, tokenizer=tokenizer, add_eos=False)
    write(source, TEXTS[::-1])
    with pytest.raises(ValueError, match=r"other tokens \(source_fingerprint: .*restore what"):
        tokenize(source, out, tokenizer=tokenizer)
    assert files(out) == before


def test_skipped_rows_are_counted_with_the_tokens(tmp_path, tokenizer):
    source = write(tmp_path / "rows.jsonl", [*TEXTS, {"no": 1}, {"text": ""}])
    with pytest.raises(ValueError, match=r"rows.jsonl, line 6[12]: "):
        tokenize(source, tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="on_error: raise, here skip"):
        tokenize(source, tmp_path / "out", tokenizer=tokenizer, on_error="skip")
    tokenize(source, tmp_path / "skips", tokenizer=tokenizer, on_error="skip", processes=2)
    skipped = PackedDataset(tmp_path / "skips", **BUDGET).skipped
    assert skipped.rows == 2 and skipped.reasons[0].startswith("rows.jsonl, line 61")


def test_a_tokenizer_without_eos_is_refused_and_the_folder_stays_usable(tmp_path):
    source, tokenizer = write(tmp_path / "rows.jsonl"), char_tokenizer("abcde")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos token to end documents with"):
        tokenize(source, tmp_path / "out", tokenizer=tokenizer)
    assert tokenize(source, tmp_path / "out", tokenizer=tokenizer, add_eos=1)["documents"] == 60


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_the_job_continues(tmp_path, tokenizer, monkeypatch, processes):
    source, out = write(tmp_path / "rows.jsonl"), tmp_path / "out"
    tokenize(source, tmp_path / "wanted", tokenizer=tokenizer)
    stock = MegatronWriter.close

    def full(self):
        if self.prefix.name == "00003":
            raise OSError(errno.ENOSPC, "No space left on device", str(self.prefix))
        return stock(self)

    monkeypatch.setattr(MegatronWriter, "close", full)
    with pytest.raises(OSError, match=r"No space left on device.* complete; fix this and run"):
        tokenize(source, out, tokenizer=tokenizer, processes=processes)
    assert (out / "00000.bin").exists() and not (out / "00003.bin").exists()
    monkeypatch.undo()
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 300)
    tokenize(source, out, tokenizer=tokenizer)
    assert files(out) == files(tmp_path / "wanted")


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path, tokenizer, monkeypatch):
    source, out = write(tmp_path / "rows.jsonl"), tmp_path / "out"
    tokenize(source, tmp_path / "wanted", tokenizer=tokenizer)
    data, status, stock = source.read_bytes(), source.stat(), MegatronWriter.close

    def changed(self):
        if self.prefix.name == "00003":
            source.write_bytes(data.replace(b"abc", b"bca"))
        return stock(self)

    monkeypatch.setattr(MegatronWriter, "close", changed)
    with pytest.raises(ValueError, match=r"rows.jsonl has changed while it was read: restore it"):
        tokenize(source, out, tokenizer=tokenizer, processes=1)
    monkeypatch.undo()
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 300)
    with pytest.raises(ValueError, match="source_fingerprint"):
        tokenize(source, out, tokenizer=tokenizer)
    source.write_bytes(data)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    tokenize(source, out, tokenizer=tokenizer)
    assert files(out) == files(tmp_path / "wanted")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".mask"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_truncated_shard_is_named_and_written_again(tmp_path, tokenizer, suffix, damage):
    source, out = source_of("chats", tmp_path), tmp_path / "out"
    tokenize(source, out, tokenizer=tokenizer)
    wanted, file = files(out), out / f"00002{suffix}"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(wanted[file.name][:-1])
    with pytest.raises(ValueError, match=rf"00002{suffix} has \d+ bytes, it was written with \d+"):
        PackedDataset(out, **BUDGET)
    tokenize(source, out, tokenizer=tokenizer)
    assert files(out) == wanted


def test_two_processes_do_not_write_to_one_folder(tmp_path, tokenizer):
    source, out = write(tmp_path / "rows.jsonl"), tmp_path / "out"
    out.mkdir()
    locked, done = FORK.Event(), FORK.Event()

    def hold():
        with tokenization.LocalFolder(out).lock():
            locked.set()
            done.wait(60)

    child = FORK.Process(target=hold)
    child.start()
    assert locked.wait(60)
    with pytest.raises(ValueError, match=r"another process is writing to .*out: wait until it"):
        tokenize(source, out, tokenizer=tokenizer)
    done.set()
    child.join()
    assert child.exitcode == 0 and tokenize(source, out, tokenizer=tokenizer)["documents"] == 60


def _job(source, out, tokenizer, kind):
    os.setpgrp()  # so that its worker processes can be counted
    processes = 1 if kind == "one process" else 2
    tokenize(source, out, tokenizer=tokenizer, processes=processes)


def _kill_at_random(tmp_path, tokenizer, kind, kills, seed=0):
    source, out = write(tmp_path / "rows.jsonl", TEXTS * 4), tmp_path / "out"
    source = source_of("gz", tmp_path) if kind == "in order" else source
    started = time.monotonic()
    tokenize(source, tmp_path / "wanted", tokenizer=tokenizer)
    longest, draw, killed = time.monotonic() - started, random.Random(seed), 0
    while killed < kills:
        child = FORK.Process(target=_job, args=(source, out, tokenizer, kind))
        child.start()
        time.sleep(draw.uniform(0, longest))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += 1
        if child.exitcode == 0 or draw.random() < 0.1:  # complete: the next one starts again
            assert child.exitcode != 0 or files(out) == files(tmp_path / "wanted")
            for path in out.glob("*") if out.exists() else ():
                path.unlink() if path.is_file() else None
    tokenize(source, out, tokenizer=tokenizer, processes=2)
    assert files(out) == files(tmp_path / "wanted")


@pytest.mark.parametrize("kind", ["one process", "two processes", "in order"])
def test_a_killed_job_continues_and_ends_with_the_same_bytes(tmp_path, tokenizer, kind):
    _kill_at_random(tmp_path, tokenizer, kind, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one process", "two processes", "in order"])
def test_fifty_kills_change_no_byte(tmp_path, tokenizer, kind):
    _kill_at_random(tmp_path, tokenizer, kind, kills=50, seed=1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_end_with_the_process_that_started_them(tmp_path, tokenizer):
    source = write(tmp_path / "rows.jsonl", TEXTS * 200)
    pids = FORK.SimpleQueue()

    def slow(text):
        pids.put(os.getpid())
        time.sleep(0.01)
        return [1]

    child = FORK.Process(target=tokenize, args=(source, tmp_path / "out"),
                         kwargs={"tokenizer": slow, "add_eos": 0, "processes": 2})  # fmt: skip
    child.start()
    workers = {pids.get() for _ in range(50)} - {child.pid}
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    deadline = time.monotonic() + 20
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
        while not pids.empty():  # a full pipe would block them
            pids.get()
    assert workers and not any(map(_runs, workers))


def test_a_worker_that_is_killed_is_one_line_and_the_job_continues(tmp_path, tokenizer):
    source, out, parent = write(tmp_path / "rows.jsonl"), tmp_path / "out", os.getpid()

    def dies(text):
        if text.startswith("abcde") and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return [1]

    with pytest.raises(OSError, match=r"process that tokenizes was killed.* run the same again"):
        tokenize(source, out, tokenizer=dies, add_eos=0, processes=2)
    assert tokenize(source, out, tokenizer=dies, add_eos=0, processes=1)["documents"] == 60


def test_tokens_are_read_from_and_written_to_a_url(tmp_path, tokenizer):
    import fsspec

    source = source_of("chats", tmp_path)
    local = tokenize(source, tmp_path / "out", tokenizer=tokenizer)
    url = f"memory://{tmp_path.name}/tokens"
    assert tokenize(source, url, tokenizer=tokenizer, processes=1) == local
    assert contents(PackedDataset(url, **BUDGET)) == contents(
        PackedDataset(tmp_path / "out", **BUDGET)
    )
    memory = fsspec.filesystem("memory")
    names = {path.rpartition("/")[2] for path in memory.ls(url, detail=False)}
    assert names == set(files(tmp_path / "out"))


def test_a_truncated_shard_behind_a_url_is_named_and_written_again(tmp_path, tokenizer):
    import fsspec

    source, url = source_of("jsonl", tmp_path), f"memory://{tmp_path.name}/tokens"
    tokenize(source, url, tokenizer=tokenizer, processes=1)
    memory, file = fsspec.filesystem("memory"), f"{url}/00001.bin"
    whole = memory.cat_file(file)
    for damaged in (whole[:-2], None):
        memory.rm_file(file) if damaged is None else memory.pipe_file(file, damaged)
        with pytest.raises(ValueError, match=r"00001\.bin has \d+ bytes, it was written with \d+"):
            PackedDataset(url, **BUDGET)
        tokenize(source, url, tokenizer=tokenizer, processes=1)
        assert memory.cat_file(file) == whole


def test_packs_of_a_web_server_are_those_of_the_folder(tmp_path, tokenizer):
    tokenize(source_of("chats", tmp_path), tmp_path / "out", tokenizer=tokenizer)
    with serve(tmp_path, period=20) as server:
        data = PackedDataset(f"{server.url}/out/", **BUDGET)
        assert contents(data) == contents(PackedDataset(tmp_path / "out", **BUDGET))
    assert server.num_failures


def test_shards_are_megatron_files_and_megatron_files_are_a_source(tmp_path, tokenizer):
    source = write(tmp_path / "rows.jsonl")
    manifest = tokenize(source, tmp_path / "out", tokenizer=tokenizer)
    raw = PackedDataset(source, tokenizer=tokenizer, shuffle=False, **BUDGET)
    shards = [PackedDataset(tmp_path / "out" / f"{n:05}", shuffle=False, **BUDGET)
              for n in range(len(manifest["shards"]))]  # fmt: skip
    assert np.concatenate([data.lengths for data in shards]).tolist() == raw.lengths.tolist()
    tokenize(tmp_path / "out" / "00001", tmp_path / "again")
    assert contents(PackedDataset(tmp_path / "again", **BUDGET)) == contents(
        PackedDataset(tmp_path / "out" / "00001", **BUDGET)
    )


def test_ids_beyond_two_bytes_are_kept(tmp_path):
    rows = [{"input_ids": [1, 70_000, 5]}, {"input_ids": [2**31 - 1, 3]}]
    tokenize(write(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    (pack,) = PackedDataset(tmp_path / "out", budget=8, shuffle=False)
    assert sorted(pack.tokens.tolist()) == sorted([1, 70_000, 5, 2**31 - 1, 3])


def test_an_unknown_setting_is_refused(tmp_path, tokenizer):
    source, out = write(tmp_path / "rows.jsonl"), tmp_path / "out"
    for name, value in {"on_error": "drop", "engine": "spark", "processes": 0}.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}")):
            tokenize(source, out, tokenizer=tokenizer, **{name: value})
