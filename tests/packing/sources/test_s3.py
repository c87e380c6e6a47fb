"""Buckets of an S3 server on this machine: tokens and packs are those of local folders."""

from __future__ import annotations

import json
from itertools import count, islice
from urllib.request import urlopen

import pytest
from char_words import char_tokenizer
from nopad.packing import PackedDataset, tokenize
from nopad.packing.encoding import shard_job
from nopad.packing.sources.remote import RemoteReadError, filesystem, remote_file

pytestmark = pytest.mark.slow
moto = pytest.importorskip("moto.server", reason="needs pip install 'moto[server]' s3fs")
s3fs = pytest.importorskip("s3fs", reason="needs pip install 'moto[server]' s3fs")
BUDGET = {"budget": 64, "seed": 1}
ROWS = [{"prompt": "abcde"[: n % 5 + 1] * (n % 7 + 1), "completion": "ab"} for n in range(300)]


@pytest.fixture
def s3(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(filesystem, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(shard_job, "RANGE_BYTES", 3000)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    urlopen(f"{url}/moto-api/reset", b"").close()  # the servers of a process share their buckets
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def contents(data) -> list:
    return [(p.tokens.tolist(), p.labels.tolist(), p.samples.tolist(), p.index) for p in data]


def fail_at_times(monkeypatch) -> list:
    """Let every fifth call of the client end without a reply."""
    stock, numbers, failed = s3fs.S3FileSystem._call_s3, count(1), []

    async def call(self, *args, **options):
        if (number := next(numbers)) % 5 == 0:
            failed.append(number)
            raise ConnectionResetError("the server is gone")
        return await stock(self, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    return failed


@pytest.mark.parametrize("fails", [False, True])
def test_tokens_and_packs_of_buckets_are_those_of_folders(s3, tmp_path, monkeypatch, fails):
    tokenizer, (rows, out) = char_tokenizer("abcde"), (tmp_path / "rows.jsonl", tmp_path / "out")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    local = tokenize(rows, out, tokenizer=tokenizer)
    s3.put_file(rows, "bucket/rows.jsonl")
    failed = fail_at_times(monkeypatch) if fails else [0]
    places = "s3://bucket/rows.jsonl", "s3://bucket/tokens"
    assert tokenize(*places, tokenizer=tokenizer, processes=1)["shards"] == local["shards"]
    data, wanted = PackedDataset(places[1], **BUDGET), contents(PackedDataset(out, **BUDGET))
    requests, stock = [], remote_file._fetch

    def fetch(fs, path, begin, end, size):
        requests.append(end - begin)
        return stock(fs, path, begin, end, size)

    monkeypatch.setattr(remote_file, "_fetch", fetch)
    assert contents(islice(data, 40)) == wanted[:40]
    assert max(requests) < 3000  # parts of shards, never all tokens
    resumed = PackedDataset(places[1], **BUDGET)
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert contents(resumed) == wanted[40:]
    assert failed


def test_a_truncated_shard_of_a_bucket_is_written_again(s3):
    tokenize(ROWS, "s3://bucket/tokens", tokenizer=char_tokenizer("abcde"), processes=1)
    whole = s3.cat_file("bucket/tokens/00000.bin")
    s3.pipe_file("bucket/tokens/00000.bin", whole[:-2])
    with pytest.raises(ValueError, match=r"00000\.bin has \d+ bytes, it was written with \d+"):
        PackedDataset("s3://bucket/tokens", **BUDGET)
    tokenize(ROWS, "s3://bucket/tokens", tokenizer=char_tokenizer("abcde"), processes=1)
    assert s3.cat_file("bucket/tokens/00000.bin") == whole


def test_missing_credentials_and_buckets_are_one_line_at_once(s3, monkeypatch, tmp_path):
    def missing(name, read):
        with pytest.raises(RemoteReadError, match=name) as error:
            read()
        assert "attempts" not in str(error.value) and "\n" not in str(error.value)

    rows = [{"input_ids": [1, 2]}]
    missing("other/x.jsonl does not exist: The specified bucket", lambda: PackedDataset(
        "s3://other/x.jsonl", **BUDGET))  # fmt: skip
    missing("The specified bucket does not exist", lambda: tokenize(rows, "s3://other/x"))
    assert [bucket["name"] for bucket in s3.ls("", detail=True)] == ["bucket"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    missing("NoCredentialsError: Unable to locate", lambda: tokenize(rows, "s3://bucket/x"))
