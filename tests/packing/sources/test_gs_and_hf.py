"""Google's object store and the hub, on servers of this machine: packs are those of folders."""

from __future__ import annotations

import json
import socket
from itertools import islice

import fsspec.config
import pytest
from char_words import char_tokenizer
from fake_hub import NAME, serve_hub
from nopad.packing import PackedDataset, tokenize
from nopad.packing.encoding import shard_job
from nopad.packing.sources.remote import filesystem, remote_file, remote_tokens

BUDGET = {"budget": 64, "seed": 1}
ROWS = [{"prompt": "abcde"[: n % 5 + 1] * (n % 7 + 1), "completion": "ab"} for n in range(3000)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several shards, and requests that are smaller than a shard."""
    monkeypatch.setattr(filesystem, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(shard_job, "RANGE_ROWS", 1000)
    monkeypatch.setattr(remote_tokens, "NEAR_BYTES", 8)


@pytest.fixture
def gs(monkeypatch):
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # gRPC, not emulated
    reason = "needs pip install gcp-storage-emulator gcsfs"
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason=reason)
    gcsfs = pytest.importorskip("gcsfs", reason=reason)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield
    gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


def contents(data) -> list:
    return [(p.tokens.tolist(), p.labels.tolist(), p.samples.tolist(), p.index) for p in data]


def check_packs(url: str, out) -> None:
    """Compare the packs of a URL with those of a folder, resumed in the middle."""
    data, wanted = PackedDataset(url, **BUDGET), contents(PackedDataset(out, **BUDGET))
    assert contents(islice(data, 20)) == wanted[:20]
    resumed = PackedDataset(url, **BUDGET)
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert contents(resumed) == wanted[20:]


def check_asked(sizes: list[int], manifest: dict) -> None:
    """The tokens were requested once, before and after the resume: no file was read ahead."""
    assert len(sizes) > 50
    assert sum(sizes) < 2 * sum(shard["files"][".bin"][0] for shard in manifest["shards"])


@pytest.mark.slow
def test_tokens_and_packs_of_google_buckets_are_those_of_folders(gs, tmp_path, monkeypatch):
    tokenizer, requests, stock = char_tokenizer("abcde"), [], remote_file._fetch
    local = tokenize(ROWS, tmp_path, tokenizer=tokenizer, processes=1)
    remote = tokenize(ROWS, "gs://bucket/tokens", tokenizer=tokenizer, processes=1)
    assert remote["shards"] == local["shards"] and len(local["shards"]) == 3

    def fetch(fs, path, begin, end, size):
        requests.append((path, end - begin))
        return stock(fs, path, begin, end, size)

    monkeypatch.setattr(remote_file, "_fetch", fetch)
    check_packs("gs://bucket/tokens", tmp_path)
    check_asked([size for path, size in requests if path.endswith(".bin")], local)


@pytest.mark.parametrize("fails", [False, True])
def test_packs_of_the_hub_are_those_of_folders(tmp_path, monkeypatch, fails):
    local = tokenize(ROWS, tmp_path / "out", tokenizer=char_tokenizer("abcde"), processes=1)
    with serve_hub(tmp_path) as hub:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.url})
        hub.fails = fails
        check_packs(f"hf://{NAME}/out", tmp_path / "out")
    check_asked([end - begin for name, begin, end in hub.asked if name.endswith(".bin")], local)
