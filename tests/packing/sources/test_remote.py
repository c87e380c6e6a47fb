"""Files behind URLs give the packs of local files, also from a server that fails now and then."""

import gzip
import json
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from char_tokenizer import tokenize_chars
from flaky_server import serve
from nopad.packing import PackedDataset
from nopad.packing.sources import open_source
from nopad.packing.sources.remote import RemoteReadError, filesystem, read_ahead, remote_tokens
from nopad.packing.sources.remote.filesystem import shown
from nopad.packing.sources.remote.read_ahead import ReadAheadFile

ROWS = [{"text": f"row {i} " + "é日" * (i % 17)} for i in range(300)]
TOKENS = {"dtype": "uint16", "add_eos": 3}
TEXTS = {
    "tokenizer": tokenize_chars, "add_eos": 3, "pretokenize": False, "shards": 4, "shuffle": 32
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch):
    """Small blocks, so that small files need many requests; hardly any waiting."""
    monkeypatch.setattr(filesystem, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(read_ahead, "BLOCK", 1000)
    monkeypatch.setattr(remote_tokens, "NEAR_BYTES", 64)
    fsspec.filesystem("http").clear_instance_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "rows.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=40)
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(4, 99, n), 3) for n in rng.integers(5, 60, 300)]
    np.concatenate(documents).astype(np.uint16).tofile(folder / "rows.bin")
    write_megatron(folder, documents)
    (folder / "texts").mkdir()
    for i, row in enumerate(ROWS[:40]):
        (folder / "texts" / f"{i:02}.txt").write_text(row["text"], encoding="utf-8")
    return folder


def write_megatron(folder, documents):
    lengths = np.array([len(d) for d in documents])
    np.concatenate(documents).astype("<u2").tofile(folder / "mega.bin")
    index = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
    index += np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    index += lengths.astype("<i4").tobytes()
    index += ((np.cumsum(lengths) - lengths) * 2).astype("<i8").tobytes()
    (folder / "mega.idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())


FORMATS = {
    "rows.jsonl": TEXTS, "rows.jsonl.gz": TEXTS, "rows.jsonl.zst": TEXTS, "rows.parquet": TEXTS,
    "texts/": TEXTS, "rows.bin": TOKENS, "mega": {},
}  # fmt: skip


def packs_and_middle(source, tools, **options):
    """The digests of all packs, and those of a second reader that continues in the middle."""
    data = PackedDataset(source, budget=100, pool=16, **options)
    digests, state = [], None
    for pack in data:
        digests.append(tools.digest(pack))
        if len(digests) == 6:
            state = json.loads(json.dumps(data.state_dict()))
    again = PackedDataset(source, budget=100, pool=16, **options)
    again.load_state_dict(state)
    return digests, [tools.digest(pack) for pack in again], state


@pytest.mark.parametrize("name", FORMATS)
def test_a_server_that_fails_at_times_gives_the_packs_of_the_disk(folder, tools, name):
    options = FORMATS[name]
    local, rest, state = packs_and_middle(folder / name, tools, **options)
    assert rest == local[6:] and len(rest) > 4
    with serve(folder) as server:
        remote, remote_rest, remote_state = packs_and_middle(
            f"{server.url}/{name}", tools, **options
        )
        assert (remote, remote_rest) == (local, rest)
        assert server.num_failures > 0 or len(server.asked) < 10
    assert state == remote_state, "a copy of the data is the same data"


@pytest.mark.parametrize("name", FORMATS)
def test_files_in_memory_give_the_packs_of_the_disk(folder, tools, name):
    fs = fsspec.filesystem("memory")
    fs.put(f"{folder}/", "/remote/", recursive=True)
    try:
        local = packs_and_middle(folder / name, tools, **FORMATS[name])
        assert packs_and_middle(f"memory://remote/{name}", tools, **FORMATS[name]) == local
    finally:
        fs.rm("/remote", recursive=True)


def test_folders_and_patterns_list_the_files_of_the_disk(folder, tmp_path):
    fs = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden.jsonl", "other.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    fs.put(f"{tmp_path}/", "/listed/", recursive=True)

    def names(source, **options):
        return [path.name for path in open_source(source, **options).paths]

    try:
        for source in (str(tmp_path), "memory://listed", f"file://{tmp_path}"):
            assert names(source, glob="*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
            assert names(f"{source}/*.jsonl") == ["a.jsonl", "b.jsonl"]
            with pytest.raises(ValueError, match="mixes"):
                open_source(source)
            with pytest.raises(ValueError, match="no file that matches"):
                open_source(source, glob="*.parquet")
        with pytest.raises(RemoteReadError, match=r"memory://listed/none.jsonl does not exist"):
            open_source("memory://listed/none.jsonl")
        with pytest.raises(ValueError, match="would be read as 2 documents"):
            open_source(["memory://listed/a.jsonl", "memory://listed/b.jsonl"])
    finally:
        fs.rm("/listed", recursive=True)


def test_a_resume_requests_no_bytes_before_its_place(folder, monkeypatch):
    rng = np.random.default_rng(0)
    rows = [{"text": rng.bytes(1500).hex()} for _ in range(240)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "long.parquet", row_group_size=40)
    with serve(folder, period=None) as server:
        for name, block in (("rows.jsonl", 1000), ("long.parquet", 32_000), ("mega.bin", 1000)):
            monkeypatch.setattr(read_ahead, "BLOCK", block)
            source = open_source(f"{server.url}/{name.removesuffix('.bin')}")
            server.asked.clear()
            if name == "mega.bin":
                source[0].flat[5000:5010]
            else:
                rows = list(source.read(0, 1))
                server.asked.clear()
                rest = list(source.read(0, 1, rows[200].cursor))
                assert [row.value for row in rest] == [row.value for row in rows[201:]]
            total = (folder / name).stat().st_size
            asked = sum(end - begin for asked, begin, end in server.asked if asked == name)
            assert 0 < asked < total * (0.5 if name != "mega.bin" else 0.001), (name, asked, total)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "texts/"])
def test_a_server_that_is_gone_is_never_a_skipped_row(folder, name):
    with serve(folder, period=None) as server:
        options = TEXTS | {"on_error": "skip", "shards": 1, "shuffle": False}
        data = PackedDataset(f"{server.url}/{name}", budget=100, **options)
        packs = iter(data)
        server.down = True
        with pytest.raises(RemoteReadError) as error:
            list(packs)
    assert f"127.0.0.1:{server.server_port}/{name}" in str(error.value)
    assert "8 attempts failed" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_told_at_once_a_server_after_all_attempts(
    folder,
):
    missing = pytest.raises(RemoteReadError, match=r"none\.jsonl does not exist")
    with serve(folder, period=None) as server, missing:
        open_source(f"{server.url}/none.jsonl")
    with pytest.raises(RemoteReadError, match=r"rows\.jsonl: 8 attempts failed"):
        open_source(f"{server.url}/rows.jsonl")


def test_tokens_of_a_server_that_is_gone_are_an_error(folder):
    with serve(folder, period=None) as server:
        data = PackedDataset(f"{server.url}/rows.bin", budget=100, **TOKENS)
        server.down = True
        with pytest.raises(RemoteReadError, match=r"rows\.bin: 8 attempts failed"):
            next(iter(data))


def test_a_server_without_ranges_serves_small_files_only(folder, monkeypatch):
    with serve(folder, period=None, ranges=False) as server:
        named = r"rows.jsonl: the server does not support range requests: download the file$"
        with pytest.raises(RemoteReadError, match=rf"^http://\S+/{named}"):
            list(open_source(f"{server.url}/rows.jsonl").read(0, 1))
        monkeypatch.setattr(read_ahead, "BLOCK", 1 << 20)
        assert len(list(open_source(f"{server.url}/rows.jsonl").read(0, 1))) == 300


def test_a_missing_package_and_an_unknown_protocol_are_named():
    with pytest.raises(
        ImportError, match=r"gs://bucket/x.jsonl: gs:// needs .*: pip install gcsfs"
    ):
        open_source("gs://bucket/x.jsonl")
    with pytest.raises(ValueError, match="fsspec knows no protocol nothing://"):
        open_source("nothing://bucket/x.jsonl")


def test_secrets_of_a_url_are_not_shown():
    assert shown("s3://key:secret@bucket/a.jsonl") == "s3://bucket/a.jsonl"


@pytest.mark.parametrize("name", ["/elsewhere/secret.jsonl", "/names/a/../../b.jsonl", "/names/\n"])
def test_names_of_a_listing_that_lead_out_are_never_opened(monkeypatch, name):
    fs = fsspec.filesystem("memory")
    listed = {name: {"type": "file", "size": 1}}
    monkeypatch.setattr(type(fs), "find", lambda *_, **__: listed)
    monkeypatch.setattr(type(fs), "info", lambda *_, **__: {"type": "directory"})
    with pytest.raises(ValueError, match=r"the name .* is absolute|no file|control characters"):
        open_source("memory://names/")


def test_bad_rows_name_their_place(folder):
    fs = fsspec.filesystem("memory")
    fs.pipe("/bad/rows.jsonl", b'{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, byte 14: not JSON"):
        list(PackedDataset("memory://bad/rows.jsonl", budget=100, tokenizer=tokenize_chars))
    fs.rm("/bad", recursive=True)


def test_the_next_blocks_are_fetched_while_one_is_read():
    from threading import Event

    later, asked = Event(), []

    def read(begin, end):
        asked.append(begin)
        if begin >= 2000:
            later.set()
        return bytes(end - begin)

    with ReadAheadFile(read, 10_000) as file:
        assert len(file.read(10)) == 10
        assert later.wait(60), "only the block that is read was asked for"
        assert sorted(asked) == [0, 1000, 2000]
        file.seek(7500)
        assert len(file.read(10)) == 10 and sorted(asked) == [0, 1000, 2000, 7000]


class NoCredentialsError(Exception):
    """As botocore's, which has no status."""


def reply_of(library: str, status: int) -> Exception:
    """Return an error with the status where this library has it."""
    replies = {
        "botocore": {"ResponseMetadata": {"HTTPStatusCode": status}},
        "huggingface_hub": SimpleNamespace(status_code=status),
    }
    error = Exception("refused")
    error.response = replies[library]  # pyright: ignore[reportAttributeAccessIssue]
    return error


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (NoCredentialsError("Unable to locate credentials"), 1),
        (reply_of("botocore", 403), 1),
        (reply_of("huggingface_hub", 401), 1),
        (reply_of("botocore", 503), filesystem.ATTEMPTS),
        (reply_of("huggingface_hub", 429), filesystem.ATTEMPTS),
    ],
)
def test_a_refused_request_is_not_repeated(error, attempts):
    calls = []

    def request():
        calls.append(1)
        raise error

    with pytest.raises(RemoteReadError, match=str(error)):
        filesystem.retry("s3://bucket/x", request)
    assert len(calls) == attempts
