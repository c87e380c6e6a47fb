"""`TextFileSource`: plain text files of any suffix (.txt, .py, .md ...), each one document."""

from __future__ import annotations

import numpy as np

from ..state.content_key import files_key
from .indexed_source import IndexedSource
from .paths import DataFile, display_name, files_fingerprint
from .remote import RemoteFile, RemoteReadError, read_together
from .source import TEXT_COLUMN

FILE_LIMIT = 1 << 30


class TextFileSource(IndexedSource):
    """Documents that are files; `text_column` is the key of the text in a row."""

    def __init__(
        self, paths: list[DataFile], text_column: str = TEXT_COLUMN, name: str | None = None
    ):
        self.paths, self.text_column = paths, text_column
        self.name = name or display_name(paths)
        self.num_bytes = sum(path.stat().st_size for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, numbers: np.ndarray):
        paths = [self.paths[number] for number in numbers.tolist()]
        if isinstance(self.paths[0], RemoteFile):
            return list(read_together(self._row, paths))
        return [self._row(path) for path in paths]

    def _row(self, path: DataFile) -> dict | ValueError:
        try:
            size = path.stat().st_size
            if size > FILE_LIMIT:
                return ValueError(f"{path.name} has {size} bytes, the limit is {FILE_LIMIT}")
            return {self.text_column: path.read_text(encoding="utf-8-sig")}
        except RemoteReadError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            return ValueError(f"{path.name} cannot be read as UTF-8 text: {error}")

    def fingerprint(self):
        return files_fingerprint("text", self.paths)

    def cache_key(self):
        return files_key("text", self.paths)
