"""Ray writes the files that processes of one machine write, also when its workers die."""

from __future__ import annotations

import json
import os
import signal

import pytest
from char_words import char_tokenizer
from nopad.packing import PackedDataset, tokenize
from nopad.packing.encoding import shard_job

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow  # a cluster takes ten seconds to start
TEXTS = [{"text": "abcde"[: n % 5 + 1] * (n % 7 + 1)} for n in range(60)]


@pytest.fixture(params=[2, 4])
def cluster(request):
    ray.init(num_cpus=request.param, include_dashboard=False, log_to_driver=False)
    yield request.param
    ray.shutdown()


def files(folder) -> dict:
    paths = [path for path in sorted(folder.iterdir()) if path.name != ".lock"]
    return {path.name: path.read_bytes() for path in paths}


def dying_tokenizer(marker):
    """A tokenizer that kills its process at one text, once; Ray sends a closure by value."""

    def tokenizer(text):
        if text == "abcde" * 6 and marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [ord(letter) for letter in text]

    return tokenizer


def test_files_and_packs_are_those_of_processes_though_a_worker_dies(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 300)
    source, marker = tmp_path / "rows.jsonl", tmp_path / "marker"
    source.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    options = {"tokenizer": dying_tokenizer(marker), "add_eos": 0}
    tokenize(source, tmp_path / "local", processes=2, **options)
    marker.touch()
    tokenize(source, tmp_path / "ray", engine="ray", **options)
    assert not marker.exists() and files(tmp_path / "ray") == files(tmp_path / "local")
    tokenize(lambda: iter(TEXTS), tmp_path / "rows", engine="ray", **options)
    packs = [
        [pack.tokens.tolist() for pack in PackedDataset(where, budget=64, **more)]
        for where, more in ((source, options), (tmp_path / "ray", {}), (tmp_path / "rows", {}))
    ]
    assert packs[0] == packs[1] == packs[2]


def test_an_error_of_a_task_is_one_line(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a"}\n{"no": 1}\n')
    try:
        with pytest.raises(ValueError, match=r"^rows.jsonl, line 2: a row with the keys \['no'\]"):
            tokenize(source, tmp_path / "out", tokenizer=char_tokenizer("abc"), engine="ray")
    finally:
        ray.shutdown()
