"""Files of every format: all rows once for any shards, and a cursor after every row."""

import gzip
import json
import struct
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nopad.packing import PackedDataset
from nopad.packing.ordering import shuffle_key
from nopad.packing.sources import jsonl, open_source
from nopad.packing.sources.jsonl import JsonlSource
from nopad.packing.sources.token_files import open_flat_file, open_megatron

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROWS = [{"text": f"row {i} " + "é日" * (i % 7)} for i in range(101)]


def write_jsonl(path: Path, rows=ROWS) -> Path:
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


def write_parquet(path: Path, rows=ROWS, group: int = 13) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_folder(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    for i, row in enumerate(ROWS):
        place = folder / ("deep" if i % 3 else ".") / f"{i:03}.py"
        place.write_text(row["text"], encoding="utf-8")
    return folder


def two_files(folder: Path) -> Path:
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS[:40])
    write_jsonl(folder / "b.jsonl.gz", ROWS[40:])
    return folder


def megatron(prefix: Path):
    return open_megatron(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))


MAKERS = {
    "jsonl": lambda folder: write_jsonl(folder / "rows.jsonl"),
    "jsonl.gz": lambda folder: write_jsonl(folder / "rows.jsonl.gz"),
    "jsonl.zst": lambda folder: write_jsonl(folder / "rows.jsonl.zst"),
    "two files": lambda folder: two_files(folder / "files"),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet"),
    "folder": lambda folder: write_folder(folder / "texts"),
}


@pytest.fixture(params=MAKERS)
def source(request, tmp_path):
    return open_source(MAKERS[request.param](tmp_path))


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 150])
def test_every_row_belongs_to_exactly_one_shard(source, shards):
    found = [row.value["text"] for s in range(shards) for row in source.read(s, shards)]
    assert sorted(found) == sorted(row["text"] for row in ROWS)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_shard_keeps_the_order_and_every_cursor_continues_it(source, shards):
    for shard in range(shards):
        rows = list(source.read(shard, shards))
        values = [row.value for row in rows]
        for number, row in enumerate(rows):
            rest = [later.value for later in islice(source.read(shard, shards, row.cursor), 3)]
            assert rest == values[number + 1 : number + 4]
    if shards == 1 and "texts" not in source.name:
        assert values == ROWS


def test_rows_known_by_number_are_shuffled_wholly(tmp_path):
    source = open_source(write_folder(tmp_path / "texts"))
    rows = [row.value["text"] for s in range(2) for row in source.read(s, 2, None, shuffle_key(1))]
    plain = [row.value["text"] for s in range(2) for row in source.read(s, 2)]
    assert sorted(rows) == sorted(plain) and rows != plain


def test_a_copy_of_the_data_is_the_same_data(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (write_jsonl(tmp_path / name / "rows.jsonl") for name in ("one", "two"))
    assert JsonlSource([one]).fingerprint() == JsonlSource([two]).fingerprint()


def test_lines_end_as_they_like(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\n{"text": "b"}\n   \n{"text": "c"}')
    for shards in (1, 2, 5):
        source = JsonlSource([path])
        rows = [row.value["text"] for s in range(shards) for row in source.read(s, shards)]
        assert rows == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["u16", "i32"])
def test_megatrons_own_files_are_read_as_megatron_reads_them(kind):
    expected = json.loads((FIXTURES / "megatron.json").read_text())[kind]
    array = megatron(FIXTURES / f"megatron_{kind}")
    parts = zip(array.begins.tolist(), array.lengths.tolist(), strict=True)
    assert [array.flat[a : a + n].tolist() for a, n in parts] == expected


def test_a_megatron_prefix_is_packed_whole():
    expected = json.loads((FIXTURES / "megatron.json").read_text())["u16"]
    data = PackedDataset(str(FIXTURES / "megatron_u16"), budget=128)
    found = [p.tolist() for pack in data for p in np.split(pack.tokens, pack.cu_seqlens[1:-1])]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("cut", [0, 5, 33, 34, 100, 1033])
def test_a_torn_megatron_index_is_refused(tmp_path, cut):
    for suffix in (".bin", ".idx"):
        data = (FIXTURES / f"megatron_u16{suffix}").read_bytes()
        (tmp_path / f"x{suffix}").write_bytes(data[:cut] if suffix == ".idx" else data)
    with pytest.raises(ValueError, match=r"x\.idx"):
        megatron(tmp_path / "x")


def test_a_torn_megatron_binary_is_refused(tmp_path):
    for suffix in (".bin", ".idx"):
        data = (FIXTURES / f"megatron_u16{suffix}").read_bytes()
        (tmp_path / f"x{suffix}").write_bytes(data[:-2] if suffix == ".bin" else data)
    with pytest.raises(ValueError, match=r"x\.bin has .* truncated"):
        megatron(tmp_path / "x")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_flat_stream_is_cut_behind_its_end_marks(tmp_path, dtype):
    path = tmp_path / "tokens.bin"
    np.array([5, 6, 0, 7, 0, 8, 9], dtype).tofile(path)
    array = open_flat_file(path, dtype, eos_token_id=0)
    parts = zip(array.begins.tolist(), array.lengths.tolist(), strict=True)
    assert [array.flat[a : a + n].tolist() for a, n in parts] == [[5, 6, 0], [7, 0], [8, 9]]
    data = PackedDataset(
        path, budget=4, dtype=dtype, add_eos=0, shuffle=False, strategy="sequential"
    )
    assert [pack.tokens.tolist() for pack in data] == [[5, 6, 0], [7, 0, 8, 9]]


def test_a_flat_stream_needs_its_type_and_end(tmp_path):
    path = tmp_path / "tokens.bin"
    np.array([1, 2, 3], "uint16").tofile(path)
    with pytest.raises(ValueError, match="dtype="):
        PackedDataset(path, budget=8)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="truncated"):
        PackedDataset(path, budget=8, dtype="uint16", add_eos=0)
    with pytest.raises(ValueError, match="dtype 'uint13': tokens are integers"):
        PackedDataset(path, budget=8, dtype="uint13", add_eos=0)


@pytest.mark.parametrize("eos", [9, 70_000, -1])
def test_an_end_mark_that_no_flat_file_holds_is_refused(tmp_path, eos):
    for name, tokens in {"a": [1, 2, 0, 3], "b": [4, 5], "c": []}.items():
        np.array(tokens, "uint16").tofile(tmp_path / f"{name}.bin")
    with pytest.raises(ValueError, match=rf"a\.bin: add_eos={eos} does not occur among its tokens"):
        open_source(tmp_path, dtype="uint16", eos_token_id=eos)
    assert len(open_source(tmp_path, dtype="uint16", eos_token_id=0)) == 3


def test_a_folder_of_different_kinds_asks_which_is_meant(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="glob="):
        open_source(tmp_path)
    assert isinstance(open_source(tmp_path, glob="*.jsonl"), JsonlSource)


def test_what_is_no_source_is_refused():
    with pytest.raises(ValueError, match="int is not a source"):
        open_source(3)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        open_source("no/such/file")


def test_hidden_files_and_folders_are_no_documents(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object.txt").write_bytes(b"\xff\xfe")
    (tmp_path / ".draft.txt").write_text("no")
    (tmp_path / "a.txt").write_text("yes")
    assert [row.value for row in open_source(tmp_path).read(0, 1)] == [{"text": "yes"}]


def test_a_file_that_went_away_is_an_error_in_its_place(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    source = open_source(tmp_path)
    (tmp_path / "b.txt").unlink()
    values = [row.value for row in source.read(0, 1)]
    assert values[::2] == [{"text": "a"}, {"text": "c"}] and "b.txt" in str(values[1])


def test_lines_left_out_are_not_looked_up_in_their_file(tmp_path, monkeypatch):
    path, asked = tmp_path / "bad.jsonl", []
    path.write_text("{}\n" * 500 + '{"input_ids": [1, 2]}\n')
    name = jsonl._LineLocation.__str__
    monkeypatch.setattr(jsonl._LineLocation, "__str__", lambda at: asked.append(at) or name(at))
    data = PackedDataset(path, budget=8, on_error="skip")
    assert data.count() == 1 and len(asked) == 20
    assert data.report()["skipped"]["rows"] == 500
    assert data.report()["skipped"]["reasons"][19].startswith("bad.jsonl, line 20: ")


def test_a_megatron_index_whose_documents_begin_late_is_refused(tmp_path):
    write_megatron(tmp_path / "x", documents=[1, 2])
    with pytest.raises(ValueError, match="do not cover"):
        megatron(tmp_path / "x")
    write_megatron(tmp_path / "x", documents=[0, 1, 2])
    assert megatron(tmp_path / "x").lengths.tolist() == [3, 3]


def write_megatron(prefix: Path, documents: list[int]) -> None:
    """Two sequences of three uint16 tokens."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, len(documents))
    body = [np.array([3, 3], "<i4"), np.array([0, 6], "<i8"), np.array(documents, "<i8")]
    prefix.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in body))
    prefix.with_suffix(".bin").write_bytes(np.arange(6, dtype="<u2").tobytes())


def test_a_mark_at_the_head_of_a_file_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n{"text": "y"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfz")
    rows = [row for name in ("a.jsonl", "b.txt") for row in open_source(tmp_path / name).read(0, 1)]
    assert [row.value for row in rows] == [{"text": "x"}, {"text": "y"}, {"text": "z"}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_of_any_length_are_the_plain_ones(tmp_path, suffix):
    rows = [{"text": "x" * (n * 7919 % 300_000)} for n in range(40)]
    path = write_jsonl(tmp_path / f"rows.jsonl{suffix}", rows)
    assert [row.value for row in JsonlSource([path]).read(0, 1)] == rows


@pytest.mark.parametrize("name", ["a.txt.gz", "a.md.zst", "a.parquet.gz", "a.bin.gz"])
@pytest.mark.parametrize("glob", [None, "a.*"])
def test_what_is_not_read_compressed_is_refused_by_name(tmp_path, name, glob):
    (tmp_path / name).write_bytes(gzip.compress(b"hello"))
    with pytest.raises(
        ValueError, match=rf"{name}: only \.jsonl can be read compressed: decompress it"
    ):
        open_source(
            tmp_path if glob else tmp_path / name, glob=glob, dtype="uint16", eos_token_id=0
        )


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("entry", [{"text": "x"}, "x"])
def test_one_large_list_is_told_how_to_become_lines(tmp_path, indent, entry):
    (tmp_path / "a.json").write_text(json.dumps([entry], indent=indent))
    first = next(iter(open_source(tmp_path / "a.json").read(0, 1))).value
    assert isinstance(first, ValueError) and "write one entry of the list per line" in str(first)


def test_a_tilde_is_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl")
    assert len(list(open_source("~/rows.jsonl").read(0, 1))) == len(ROWS)


@pytest.mark.parametrize("kind", ["flat", "megatron"])
def test_a_token_file_that_shrinks_while_it_is_read_is_named(tmp_path, kind):
    """Without the check the process ends with a bus error."""
    if kind == "flat":
        path = tmp_path / "x.bin"
        np.tile(np.array([5, 6, 7, 0], np.uint16), 20_000).tofile(path)
        data = PackedDataset(path, budget=1024, dtype="uint16", add_eos=0)
    else:
        for suffix in (".bin", ".idx"):
            (tmp_path / f"x{suffix}").write_bytes((FIXTURES / f"megatron_u16{suffix}").read_bytes())
        path, data = tmp_path / "x.bin", PackedDataset(tmp_path / "x", budget=64)
    packs = iter(data)
    next(packs)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(2)
    with pytest.raises(ValueError, match=r"x\.bin has 2 bytes, it had \d+ when it was opened"):
        list(data)
    path.write_bytes(content)
    count = sum(1 for _ in data)
    path.unlink()  # the mapping stays
    assert sum(1 for _ in data) == count
