"""While data is prepared, the user is told what takes the time."""

import json
import multiprocessing
import os
import re
import signal

import numpy as np
import pytest
from nopad.packing import PackedDataset, preparation_progress
from nopad.packing.planning import pack_lengths, planner
from numba import njit
from torch.utils.data import DataLoader
from tqdm import tqdm


def one_pack(sizes, deferrals, packed, capacity, pool, flush, final):
    return np.arange(len(sizes)), np.array([0, len(sizes)]), np.arange(0), deferrals[:0]


def slow_to_compile(monkeypatch) -> None:
    """Let the planner put everything into one pack, by a function that is compiled when called."""
    compiled = njit(one_pack)
    monkeypatch.setattr(planner, "fit_window", compiled)
    monkeypatch.setattr(planner, "fit_windows", compiled)


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("rank, told", [("0", True), ("1", False)])
@pytest.mark.parametrize("kind", ["file", "list"])
def test_encoding_says_how_many_tokens_are_done_and_what_is_left(
    monkeypatch, capsys, tmp_path, kind, rank, told
):
    monkeypatch.setattr(preparation_progress, "LINE_INTERVAL", 0)
    monkeypatch.setenv("RANK", rank)
    rows = [{"text": "漢字か仮名の長い文章"}] * 1000
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    PackedDataset(str(path) if kind == "file" else rows, tokenizer=byte_ids, budget=64)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (4 if told else 0)
    if told:
        assert re.search(r"7,680 of about 3\d,\d{3} tokens, [\d,]+ tokens/s, .* s left", lines[0])
        assert "30,000 of about 30,000 tokens" in lines[-1] and lines[-1].endswith(" 0 s left")


def test_quick_preparation_is_silent(capsys):
    PackedDataset([{"text": "some text"}] * 300, tokenizer=byte_ids, budget=64)
    assert capsys.readouterr().err == ""


def test_the_compilation_of_the_packer_is_announced_once(monkeypatch, capsys):
    slow_to_compile(monkeypatch)
    for _ in range(2):
        assert len(pack_lengths([3, 2], budget=8)) == 1
    said = capsys.readouterr().err
    assert said.count("compiling the packer") == 1
    assert "at every start: set NUMBA_CACHE_DIR to a persistent folder)" in said


def test_one_of_several_workers_announces_the_compilation(monkeypatch, capfd):
    slow_to_compile(monkeypatch)
    data = PackedDataset([[5, 6], [7]] * 4, budget=8, pretokenize=False, shards=2)
    assert len(list(DataLoader(data, batch_size=None, num_workers=2))) > 1
    assert capfd.readouterr().err.count("compiling the packer") == 1


def test_a_killed_process_that_held_the_lock_of_tqdm_stops_no_progress():
    fork = multiprocessing.get_context("fork")

    def hold():
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def encode():
        tqdm.set_lock(fork.RLock())
        child = fork.Process(target=hold)
        child.start()
        child.join()
        preparation_progress.TokenProgress("encoding rows").close()
        preparation_progress.say("encoded")

    process = fork.Process(target=encode)
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    assert not hangs and process.exitcode == 0
