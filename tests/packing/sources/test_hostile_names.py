"""Names and cursors from outside never open a file outside; bombs are rejected naming the limit."""

import json

import numpy as np
import pyarrow as pa
import pytest
from char_tokenizer import tokenize_chars
from nopad.packing import PackedDataset, pipeline
from nopad.packing.readers import shard_reader
from nopad.packing.readers.shard_reader import compress_state, decompress_state
from nopad.packing.sources import decompress, jsonl, parquet
from nopad.packing.sources.jsonl import JsonlSource
from nopad.packing.sources.paths import list_files, resolve_inside

NAMES = [
    "../secret", "..", "a/../../secret", "a/..", "./../x", "..\\secret", "a\\..\\..\\x",
    "/etc/passwd",
    "//server/share", "\\\\server\\share", "C:\\windows", "C:x", "c:/x", "D:", "~/x", "~root/x",
    "a\x00b", "\x00", "a\nb", "a\rb", "a\tb", "\x1b[31m", "a\x7f", "",
    "x" * 256, "a/" + "y" * 300, "é" * 200, "../" * 40 + "etc/passwd", "a/b/../../../c",
    "..//x", "/", "\\", "\\x", "/..", "a/./../../b", "link/secret", "link", "deep/link/secret",
    "..\x00", "./..", "loop/x",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder with links that lead out of it, beside a secret."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "deep" / "link").symlink_to(tmp_path / "outside")
    (inside / "loop").symlink_to(tmp_path)
    return inside


def test_forty_hostile_names_are_refused_before_anything_is_opened(folder, monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *a, **k: pytest.fail("something was opened"))
    accepted = []
    for name in NAMES:
        try:
            accepted.append(resolve_inside(folder, name))
        except ValueError:
            continue
    print(f"{len(accepted)} of {len(NAMES)} hostile names accepted")
    assert not accepted and len(NAMES) >= 40


def test_good_names_are_accepted(folder):
    for name in ("a.jsonl", "deep/b.jsonl", "..hidden", "a..b", "naïve 日本.txt"):
        assert resolve_inside(folder, name) == folder / name


def test_a_folder_does_not_lead_through_its_links(folder):
    (folder / "a.txt").write_text("hello")
    (folder / "b.txt").symlink_to(folder.parent / "outside" / "secret")
    with pytest.raises(ValueError, match="leads out of its folder through a link"):
        list_files(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_cannot_name_a_file(tmp_path, name):
    """Cursors are numbers: a name instead is rejected before a file is opened with it."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i]}) + "\n" for i in range(40)))
    data = PackedDataset(path, budget=4, pool=2, shards=1, shuffle=4, pretokenize=False)
    packs = iter(data)
    for _ in range(4):
        next(packs)
    state = data.state_dict()
    inner = decompress_state(state["shards"]["0"]["state"])
    for cursor in (name, [name, 0], [0, name], {"file": name}):
        inner["readers"][0]["marks"][0][3] = cursor
        state["shards"]["0"]["state"] = compress_state(inner)
        again = PackedDataset(path, budget=4, pool=2, shards=1, shuffle=4, pretokenize=False)
        again.load_state_dict(state)
        with pytest.raises(ValueError, match=r"cursor|malformed"):
            next(iter(again))


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_over_the_limit_is_passed_over_without_being_kept(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(jsonl, "LINE_LIMIT", 1 << 20)
    path = tmp_path / ("rows.jsonl.zst" if packed else "rows.jsonl")
    data = b'{"input_ids": [1]}\n{"text": "' + b"x" * (3 << 20) + b'"}\n{"input_ids": [2]}\n'
    path.write_bytes(pa.compress(data, codec="zstd", asbytes=True) if packed else data)
    rows = list(JsonlSource([path]).read(0, 1))
    assert [row.value for row in rows[::2]] == [{"input_ids": [1]}, {"input_ids": [2]}]
    assert "the limit is 1048576" in str(rows[1].value)


def test_a_line_of_ten_megabytes_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 10_000_000 + b'"}\n')
    assert len(next(JsonlSource([path]).read(0, 1)).value["text"]) == 10_000_000
    assert jsonl.LINE_LIMIT == 64 << 20


def test_a_decompression_bomb_is_bounded_by_the_limit_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_LIMIT", 1 << 20)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(pa.compress(b"0" * (64 << 20), codec="gzip", asbytes=True))
    assert path.stat().st_size < 1 << 17
    (row,) = JsonlSource([path]).read(0, 1)
    assert "the limit is 1048576" in str(row.value)


def test_nesting_beyond_the_limit_is_refused_naming_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 64 + "]" * 64 + "\n" + "[" * 65 + "]" * 65 + "\n")
    rows = list(JsonlSource([path]).read(0, 1))
    assert isinstance(rows[0].value, list) and "deeper than 64" in str(rows[1].value)


def test_a_row_group_over_the_limit_is_refused_naming_it(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_LIMIT", 1000)
    path = tmp_path / "rows.parquet"
    parquet.pq.write_table(pa.table({"input_ids": [np.arange(5000)]}), path)
    (row,) = parquet.ParquetSource([path]).read(0, 1)
    assert "the limit is 1000" in str(row.value)


@pytest.mark.parametrize("form", ["gz", "zst", "parquet"])
def test_a_source_is_small_by_what_comes_out_of_it(tmp_path, monkeypatch, form):
    """What is small is encoded at once: a bomb would fill the memory."""
    limit = 1 << 20
    for module in (decompress, parquet, pipeline):
        monkeypatch.setattr(module, "SMALL_BYTES", limit)
    sizes, kinds = {}, {}
    for name, count in (("small", 10), ("bomb", 3000)):
        rows = [{"text": "x" * 1000}] * count
        path = tmp_path / f"{name}.jsonl.{form}"
        if form == "parquet":
            path = tmp_path / f"{name}.parquet"
            parquet.pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            codec = {"gz": "gzip", "zst": "zstd"}[form]
            path.write_bytes(pa.compress(data, codec=codec, asbytes=True))
        data = PackedDataset(path, tokenizer=tokenize_chars, add_eos=0, budget=64)
        sizes[name], kinds[name] = path.stat().st_size, type(data.reader).__name__
    assert 5 * sizes["bomb"] < limit / 2
    assert kinds == {"small": "PlannedPacks", "bomb": "StreamedPacks"}


def test_a_row_group_comes_out_in_batches_within_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_LIMIT", 8 << 20)
    path = tmp_path / "rows.parquet"
    text = pa.array(["x" * 100_000]).dictionary_encode()
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), text.dictionary)
    parquet.pq.write_table(pa.table({"text": column}), path, store_schema=False)
    assert path.stat().st_size < 1 << 17
    with parquet.pq.ParquetFile(path) as file:
        batches = [batch.nbytes for batch in parquet._batches(file, 0)]
    assert sum(batches) > 300_000_000 and max(batches) <= 8 << 20
    source = parquet.ParquetSource([path])
    rows = [sum(1 for _ in source.read(shard, 7)) for shard in range(7)]
    assert sum(rows) == 3000 and source.num_bytes > 64 << 20


def test_a_row_of_many_repeated_values_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_LIMIT", 1 << 20)
    path = tmp_path / "rows.parquet"
    parquet.pq.write_table(pa.table({"input_ids": [np.zeros(1_000_000, np.int64)]}), path)
    assert path.stat().st_size < 10_000
    (row,) = parquet.ParquetSource([path]).read(0, 1)
    assert "input_ids.list.element has 8000000 bytes" in str(row.value)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_compressed_file_of_no_bytes_is_named_once(tmp_path, name, shards):
    (tmp_path / name).touch()
    good = tmp_path / "zz.jsonl"
    good.write_text('{"input_ids": [1, 2]}\n')
    source = JsonlSource([tmp_path / name, good])
    values = [row for shard in range(shards) for row in source.read(shard, shards)]
    (bad,) = [row for row in values if isinstance(row.value, ValueError)]
    assert "has no bytes: it is truncated" in str(bad.value) and name in str(bad.location)
    assert [row.value for row in values if row is not bad] == [{"input_ids": [1, 2]}]
    with pytest.raises(ValueError, match=name):
        PackedDataset(tmp_path, budget=8)
    assert PackedDataset(tmp_path, budget=8, on_error="skip").skipped.rows == 1


def test_columns_of_one_name_are_refused(tmp_path):
    path, ids = tmp_path / "rows.parquet", pa.array([[1, 2]])
    inner = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], ["role", "role"])
    for columns, names in (([ids, ids], ["input_ids"] * 2), ([inner], ["messages"])):
        parquet.pq.write_table(pa.Table.from_arrays(columns, names), path)
        (row,) = parquet.ParquetSource([path]).read(0, 1)
        assert "appears twice" in str(row.value)


def test_a_state_that_unfolds_beyond_the_limit_is_neither_written_nor_read(monkeypatch):
    large = compress_state({"packer": "0" * (2 << 20)})
    monkeypatch.setattr(shard_reader, "STATE_LIMIT", 1 << 20)
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        decompress_state(large)
    with pytest.raises(ValueError, match=r"a shard's state has 2097165 bytes, .* join fewer"):
        compress_state({"packer": "0" * (2 << 20)})
