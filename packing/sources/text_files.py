"""Plain text: every file is one document, with any suffix (.txt, .py, .md ...)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .content_key import files_key
from .paths import display_name, files_fingerprint
from .source import IndexedSource

FILE_LIMIT = 1 << 30


class TextFileSource(IndexedSource):
    """Documents that are files; `text_column` is the key of the text in a row."""

    def __init__(self, paths: list[Path], text_column: str = "text", name: str | None = None):
        self.paths, self.text_column = paths, text_column
        self.name = name or display_name(paths)
        self.num_bytes = sum(path.stat().st_size for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, numbers: np.ndarray):
        return [self._row(self.paths[number]) for number in numbers.tolist()]

    def _row(self, path: Path) -> dict | ValueError:
        try:
            size = path.stat().st_size
            if size > FILE_LIMIT:
                return ValueError(f"{path.name} has {size} bytes, the limit is {FILE_LIMIT}")
            return {self.text_column: path.read_text(encoding="utf-8-sig")}
        except (OSError, UnicodeDecodeError) as error:
            return ValueError(f"{path.name} cannot be read as UTF-8 text: {error}")

    def fingerprint(self):
        return files_fingerprint("text", self.paths)

    def cache_key(self):
        return files_key("text", self.paths)
