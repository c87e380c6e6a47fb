"""Recognise what the user handed in, and open it as tokens or as rows.

ready tokens, lengths known   Dataset with input_ids, Megatron prefix, flat .bin   ─▶ [TokenArray]
rows to be encoded            jsonl, parquet, text files, Dataset, lists, streams  ─▶ RowSource

A path that does not exist and reads `owner/name` is a dataset on the hub, which is streamed.
"""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .in_memory import Iterated, Listed
from .paths import files_of
from .source import RowSource
from .text_files import TextFiles
from .token_store import TokenArray, TokenStore

Opened = list[TokenArray] | RowSource
HUB_NAME = re.compile(r"[\w-]+/[\w-][\w.-]*")
FILE_NAME = re.compile(r".*\.(jsonl?|ndjson|parquet|bin|gz|zst|txt|md|py|csv)")
"""What does not exist is on the hub if it reads owner/name, unless it reads like a file."""
TABLES = ("text/csv", "text/tab-separated-values")
"""Text by name, but rows by nature: one document of them all would be wrong in silence."""


def open_source(
    source: Any,
    *,
    column: str = "text",
    glob: str | None = None,
    dtype: str | None = None,
    eos: int | None = None,
    number: int = 0,
) -> Opened:
    """Open a source; `number` is its place in a mixture."""
    if isinstance(source, str | Path):
        return _open_path(Path(source).expanduser(), column, glob, dtype, eos, number)
    if isinstance(source, list | tuple) and _names_files(source):
        raise ValueError(
            f"{source[0]} is a file, the list would be read as {len(source)} documents: pass a "
            "folder and glob=, or [(file, weight), ...]"
        )
    if isinstance(source, RowSource):
        return source
    if isinstance(source, TokenArray):
        return [source]
    if isinstance(source, TokenStore):
        return source.shelves
    if type(source).__module__.split(".")[0] == "datasets":
        return _open_dataset(source, "dataset", number)
    if hasattr(source, "columns") and hasattr(source, "shape"):
        raise ValueError(
            f"{type(source).__name__} is a table, no list of rows: pass datasets.Dataset."
            "from_pandas(table), or its rows as dicts"
        )
    rows = not isinstance(source, Mapping)
    if rows and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return Listed(source)
    if rows and (callable(source) or isinstance(source, Iterable)):
        return Iterated(source, getattr(source, "__name__", type(source).__name__))
    raise ValueError(
        f"{type(source).__name__} is no source: pass a path, a list, an iterable, a function that "
        "returns an iterator, a datasets.Dataset, or a list of (source, weight)"
    )


def _open_path(path: Path, column: str, glob, dtype, eos, number: int) -> Opened:
    if _beside(path, ".idx").is_file() and _beside(path, ".bin").is_file():
        from .token_files import megatron_shelf

        return [megatron_shelf(path, number)]
    if path.is_dir() and (path / "dataset_info.json").is_file():
        from .hf_datasets import open_saved

        return _open_dataset(open_saved(path), path.name, number)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.parent.name for one in path.glob("*/dataset_info.json"))
        raise ValueError(f"{path} has the splits {splits}: pass the folder of one of them")
    name = path.as_posix()
    if not path.exists() and HUB_NAME.fullmatch(name) and not FILE_NAME.fullmatch(name):
        from .hf_datasets import open_hub

        return _open_dataset(open_hub(name), path.name, number)
    files = files_of(path, glob)
    kinds = {_kind(file, any_text=glob is not None) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"{path} mixes {sorted(kinds)} files: choose some with glob=")
    return _open_files(files, kinds.pop(), column, dtype, eos, number, path)


def _open_files(files: list[Path], kind: str, column: str, dtype, eos, number, path) -> Opened:
    if kind == "jsonl":
        from .jsonl import JsonLines

        return JsonLines(files)
    if kind == "parquet":
        from .parquet import Parquet

        return Parquet(files)
    if kind == "tokens":
        from .token_files import flat_shelves

        if dtype is None or eos is None:
            raise ValueError(f"{path}: flat tokens need dtype= (uint16 or uint32) and eos= (an id)")
        return flat_shelves(files, dtype, eos, number)
    return TextFiles(files, column, path.name)


def _open_dataset(data: Any, name: str, number: int) -> Opened:
    from .hf_datasets import StreamedRows, TableRows, token_shelves

    if isinstance(data, dict):
        raise ValueError(f"{name} has the splits {sorted(data)}: pass one of them")
    if not hasattr(data, "__len__"):
        return StreamedRows(data, name)
    return token_shelves(data, name, number) or TableRows(data, name)


def _kind(file: Path, any_text: bool) -> str:
    """Tell a file's kind by its name; what was chosen by a glob may be text of any name."""
    suffixes = [s for s in file.suffixes if s not in (".gz", ".zst")]
    last = suffixes[-1] if suffixes else ""
    if last in (".jsonl", ".json", ".ndjson"):
        return "jsonl"
    if file.suffix in (".gz", ".zst"):
        raise ValueError(f"{file}: only .jsonl is read compressed: unpack it first")
    if last in (".parquet", ".bin"):
        return {".parquet": "parquet", ".bin": "tokens"}[last]
    guess = mimetypes.guess_type(file.name)[0] or ("text/plain" if not last else "")
    if any_text or (guess.startswith("text/") and guess not in TABLES):
        return "text"
    raise ValueError(
        f"{file}: unknown file type {last}: there are .jsonl, .parquet, .bin and text (.txt ...); "
        f"to read it as text, pass its folder and glob='*{last}'"
    )


def _names_files(rows: Sequence[Any]) -> bool:
    """Whether the first of a list is no document but the name of a file."""
    return bool(rows) and isinstance(rows[0], str | Path) and os.path.isfile(rows[0])


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
