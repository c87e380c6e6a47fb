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
        # False by identity: it equals 0, a default worth telling.
        if action.default is False or action.default in (None, [], argparse.SUPPRESS):
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
    """Take a file's name to write to; make its folder, or refuse now what would fail in an hour."""
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        reason = f"{text}: {path.parent} is no folder, nor can be made one"
        raise argparse.ArgumentTypeError(reason) from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def count(text: str) -> int:
    """Take a number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    """Take a number from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1")
    return int(text)


def share(text: str) -> int | float:
    """Take a number from 1, or below it a share."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1, or a share such as 0.5")
    return int(number) if number >= 1 else number
