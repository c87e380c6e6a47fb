"""What the commands' options share: how `--help` tells them, and files tried before any work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Texts as they stand, and defaults where they say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `nopad NAME` whose help is the command's docstring."""
    text = (doc or "").replace("`", "").strip()
    return argparse.ArgumentParser(f"nopad {name}", description=text, formatter_class=_Help)


def model_options(add: Any) -> None:
    """Where a model runs, and as what."""
    add("--tokenizer", help="folder or hub name; without it, the model's")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights")
    add("--device", help="cuda, cuda:1, cpu ...; without it, what there is")


def new_file(text: str) -> Path:
    """Take a file's name to write to; refuse now what could not be written in an hour."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def write(path: Path, text: str) -> None:
    """Write a file, making the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def count(text: str) -> int:
    """Take a number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0")
    return int(text)
