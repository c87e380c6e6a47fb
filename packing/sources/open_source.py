"""Recognize the type of a source, and open it as tokens or as rows.

ready tokens, lengths known   corpus, Dataset with input_ids, Megatron, flat .bin  ─▶ [TokenArray]
rows to be encoded            jsonl, parquet, text files, Dataset, lists, streams  ─▶ RowSource

A path that does not exist and has the form `owner/name` is a dataset on the hub, which is streamed.
Files behind URLs (s3://, gs://, hf://, https://, memory://) are read through fsspec.
"""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corpus import JOB, MANIFEST, is_corpus, open_corpus
from .in_memory import IterableSource, ListSource
from .local_folder import Folder, LocalFolder
from .paths import DataFile, check_name, list_files
from .remote import RemoteFolder, exists, is_url, list_url, local_path, shown
from .source import TEXT_COLUMN, RowSource
from .text_files import TextFileSource
from .token_store import TokenArray, TokenStore

Opened = list[TokenArray] | RowSource
HUB_NAME = re.compile(r"[\w-]+/[\w-][\w.-]*")
FILE_NAME = re.compile(r".*\.(jsonl?|ndjson|parquet|bin|gz|zst|txt|md|py|csv)")
"""A path that does not exist is on the hub if it matches HUB_NAME but not FILE_NAME."""
TABLES = ("text/csv", "text/tab-separated-values")
"""Text by type, but rows by content: reading each file as one document would be silently wrong."""


@dataclass(frozen=True, slots=True)
class _PathOptions:
    text_column: str
    glob: str | None
    dtype: str | None
    eos_token_id: int | None
    number: int
    as_rows: bool


def open_source(
    source: Any,
    *,
    text_column: str = TEXT_COLUMN,
    glob: str | None = None,
    dtype: str | None = None,
    eos_token_id: int | None = None,
    number: int = 0,
    as_rows: bool = False,
) -> Opened:
    """Open a source; `number` is its index in a mixture, as_rows: for other columns than tokens."""
    if isinstance(source, str) and not source:
        raise ValueError("the name of the source is empty: pass a file or a folder")
    if isinstance(source, str | Path):
        options = _PathOptions(text_column, glob, dtype, eos_token_id, number, as_rows)
        if is_url(source):
            path = local_path(source)
            return _open_url(source, options) if path is None else _open_path(path, options)
        return _open_path(Path(os.path.expanduser(source)), options)
    if isinstance(source, list | tuple) and _lists_files(source):
        raise ValueError(
            f"{source[0]} is a file, but the list would be read as {len(source)} documents: pass a "
            "folder and glob=, a pattern with *, or [(file, weight), ...]"
        )
    if isinstance(source, RowSource):
        return source
    if isinstance(source, TokenArray):
        return [source]
    if isinstance(source, TokenStore):
        return source.arrays
    if type(source).__module__.split(".")[0] == "datasets":
        return _open_dataset(source, "dataset", number, as_rows)
    if hasattr(source, "columns") and hasattr(source, "shape"):
        raise ValueError(
            f"{type(source).__name__} is a table, not a list of rows: pass datasets.Dataset."
            "from_pandas(table), or its rows as dicts"
        )
    is_mapping = isinstance(source, Mapping)
    if not is_mapping and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return ListSource(source)
    if not is_mapping and (callable(source) or isinstance(source, Iterable)):
        return IterableSource(source, getattr(source, "__name__", type(source).__name__))
    raise ValueError(
        f"{type(source).__name__} is not a source: pass a path, a list, an iterable, a function "
        "that returns an iterator, a datasets.Dataset, or a list of (source, weight)"
    )


def may_be_folder(source: Any) -> bool:
    """Return whether a source may have several files to choose from."""
    if not isinstance(source, str | Path):
        return isinstance(source, RowSource | TokenArray | TokenStore)  # opened already
    path = local_path(source) if is_url(source) else Path(os.path.expanduser(source))
    if path is None:
        return not FILE_NAME.fullmatch(str(source).partition("?")[0])
    return path.is_dir()


def _open_path(path: Path, options: _PathOptions) -> Opened:
    if all(Path(f"{path}{suffix}").is_file() for suffix in (".idx", ".bin")):
        from .token_files import open_megatron

        index, binary = (path.with_name(path.name + suffix) for suffix in (".idx", ".bin"))
        return [open_megatron(index, binary, options.number)]
    if path.is_dir() and is_corpus(LocalFolder(path)):
        return _open_corpus(LocalFolder(path), options)
    if path.is_dir() and (path / "dataset_info.json").is_file():
        from .hf_datasets import open_saved

        return _open_dataset(open_saved(path), path.name, options.number, options.as_rows)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(info.parent.name for info in path.glob("*/dataset_info.json"))
        raise ValueError(f"{path} has the splits {splits}: pass the folder of one of them")
    name = path.as_posix()
    if not path.exists() and HUB_NAME.fullmatch(name) and not FILE_NAME.fullmatch(name):
        from .hf_datasets import open_hub

        return _open_dataset(open_hub(name), path.name, options.number, options.as_rows)
    files = list_files(path, options.glob)
    return _open_files(list(files), str(path), path.absolute().name, options)


def _open_url(url: str, options: _PathOptions) -> Opened:
    named = FILE_NAME.fullmatch(url.partition("?")[0]) or url.endswith("/") or "*" in url
    if not named and exists(f"{url}.idx") and exists(f"{url}.bin"):
        from .token_files import open_megatron

        (index,), (binary,) = (list_url(url + end, None, check_name) for end in (".idx", ".bin"))
        return [open_megatron(index, binary, options.number)]
    files = list_url(url, options.glob, check_name)
    if any(file.name in (MANIFEST, JOB) for file in files) and is_corpus(RemoteFolder(url)):
        return _open_corpus(RemoteFolder(url, {f.name: f.size for f in files}), options)
    place = shown(url)
    if any(file.name == "dataset_info.json" for file in files):
        raise ValueError(f"{place} is a saved dataset: pass datasets.load_from_disk(url)")
    return _open_files(list(files), place, place.rstrip("/").rpartition("/")[2], options)


def _open_corpus(folder: Folder, options: _PathOptions) -> Opened:
    for name, value in (("glob", options.glob), ("dtype", options.dtype)):
        if value is not None:
            raise ValueError(f"{name}={value!r}: {folder} is a folder of tokens, which has its own")
    return open_corpus(folder, options.number)


def _open_files(files: list[DataFile], place: str, name: str, options: _PathOptions) -> Opened:
    formats = {_format_of(file, any_text=options.glob is not None) for file in files}
    if len(formats) > 1:
        raise ValueError(f"{place} mixes {sorted(formats)} files: choose some with glob=")
    file_format = formats.pop()
    if file_format == "jsonl":
        from .jsonl import JsonlSource

        return JsonlSource(files)
    if file_format == "parquet":
        from .parquet import ParquetSource

        return ParquetSource(files)
    if file_format == "tokens":
        from .token_files import open_flat_files

        if options.dtype is None or options.eos_token_id is None:
            raise ValueError(
                f"{place}: flat tokens need dtype= (uint16 or uint32) and add_eos= (an id)"
            )
        return open_flat_files(files, options.dtype, options.eos_token_id, options.number)
    return TextFileSource(files, options.text_column, name)


def _open_dataset(data: Any, name: str, number: int, as_rows: bool) -> Opened:
    from .hf_datasets import DatasetSource, IterableDatasetSource, token_arrays

    if isinstance(data, dict):
        raise ValueError(f"{name} has the splits {sorted(data)}: pass one of them")
    if not hasattr(data, "__len__"):
        return IterableDatasetSource(data, name)
    arrays = None if as_rows else token_arrays(data, name, number)
    return arrays or DatasetSource(data, name)


def _format_of(file: DataFile, any_text: bool) -> str:
    """Return a file's format, by its name; any_text: unknown suffixes are text."""
    suffixes = [s for s in file.suffixes if s not in (".gz", ".zst")]
    last = suffixes[-1] if suffixes else ""
    if last in (".jsonl", ".json", ".ndjson"):
        return "jsonl"
    if file.suffix in (".gz", ".zst"):
        raise ValueError(f"{file}: only .jsonl can be read compressed: decompress it first")
    if last in (".parquet", ".bin"):
        return {".parquet": "parquet", ".bin": "tokens"}[last]
    guess = mimetypes.guess_type(file.name)[0] or ("text/plain" if not last else "")
    if any_text or (guess.startswith("text/") and guess not in TABLES):
        return "text"
    raise ValueError(
        f"{file}: unknown file type {last}: supported are .jsonl, .parquet, .bin and text "
        f"(.txt ...); to read it as text, pass its folder and glob='*{last}'"
    )


def _lists_files(rows: Sequence[Any]) -> bool:
    """Return whether the first entry of a list is the name of a file instead of a document."""
    if not rows or not isinstance(rows[0], str | Path):
        return False
    if is_url(rows[0]):
        return FILE_NAME.fullmatch(rows[0]) is not None and not re.search(r"\s", rows[0])
    return os.path.isfile(rows[0])
