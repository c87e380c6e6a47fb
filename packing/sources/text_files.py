"""Plain text: every file is a document, whatever it is called (.txt, .py, .md ...)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .paths import files_fingerprint, name_of
from .source import Indexed

FILE_LIMIT = 1 << 30


class TextFiles(Indexed):
    """Documents that are files; `column` is where the row's text will stand."""

    def __init__(self, paths: list[Path], column: str = "text", name: str | None = None):
        self.paths, self.column = paths, column
        self.name = name or name_of(paths)
        self.size = sum(path.stat().st_size for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, numbers: np.ndarray):
        return [self._row(self.paths[number]) for number in numbers.tolist()]

    def _row(self, path: Path) -> dict | ValueError:
        try:
            size = path.stat().st_size
            if size > FILE_LIMIT:
                return ValueError(f"{path.name} has {size} bytes, the limit is {FILE_LIMIT}")
            return {self.column: path.read_text(encoding="utf-8-sig")}
        except (OSError, UnicodeDecodeError) as error:
            return ValueError(f"{path.name} cannot be read as UTF-8 text: {error}")

    def fingerprint(self):
        return files_fingerprint("text", self.paths)
