"""What the commands' options share: how `--help` and errors tell them, how data is read, numbers,
and files tried before any work.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
ARGUMENT = re.compile(
    r"""(?<![\w/])(add_eos|attn_implementation|budget|dtype|glob|max_steps|memory|"""
    r"""num_train_epochs|on_error|overflow|text_column|tokenizer)="""
    r"""(?:"([^"]+)"|('[^']+'|-?\w+(?:\.\d+)?))?"""
)
"""A setting as Python says it, with its value if there is one."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Texts as they stand, and defaults where they say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # False by identity: it equals 0, a default worth telling.
        if action.default is False or action.default in (None, [], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `nopad NAME` whose help is the command's docstring."""
    text = (doc or "").replace("`", "").strip()
    return argparse.ArgumentParser(f"nopad {name}", description=text, formatter_class=Help)


def model_options(add: Any) -> None:
    """Where a model runs, and as what."""
    add("--tokenizer", help="folder or hub name; without it, the model's")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights")
    add("--device", help="cuda, cuda:1, cpu ...; without it, what there is")


def reading_options(add: Any) -> None:
    """How data is read, besides where it lies."""
    add("--glob", help="which files of a folder, such as '*.jsonl'")
    add("--on-error", default="raise", choices=("raise", "skip"),
        help="what to do at a row that cannot be used: stop, or leave it out")  # fmt: skip
    add(
        "--add-eos", type=_end, help="id that ends a document, or none; without it, the tokenizer's"
    )
    add("--dtype", choices=("uint16", "uint32"), help="of tokens in a flat .bin file")


def reading_choices(args: argparse.Namespace) -> dict[str, Any]:
    """These options, as `PackedDataset` takes them."""
    add_eos = True if args.add_eos is None else args.add_eos
    return {"glob": args.glob, "on_error": args.on_error, "add_eos": add_eos, "dtype": args.dtype}


def in_options(message: object, **renamed: str) -> str:
    """Say what an error says of Python's arguments in words of the command line.

    >>> in_options('no eos: pass add_eos= an id, or add_eos=False (on_error="skip" leaves it out)')
    'no eos: pass --add-eos an id, or --add-eos none (--on-error skip leaves it out)'
    """

    def option(found: re.Match) -> str:
        name, value = found[1], found[2] or found[3]
        words = "--" + str(renamed.get(name, name)).replace("_", "-")
        return f"{words} {'none' if value == 'False' else value}" if value else words

    return ARGUMENT.sub(option, str(message))


def _end(text: str) -> int | bool:
    if text == "none":
        return False
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: an id, or none")
    return int(text)


def attention(name: str) -> str:
    """Take an implementation that Transformers knows, or one of the hub: those have a slash."""
    if name == "nopad":  # what is the default shall not load libraries to be known
        return name
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ..attention.hf import NAME

    known = sorted({"eager", NAME, *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if name not in known and "/" not in name:
        told = f"{name!r}: no such attention; there are {', '.join(known)}"
        raise argparse.ArgumentTypeError(told)
    return name


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
    """Take a whole number from 0.

    >>> count("1e3"), count("12")
    (1000, 12)
    """
    return _whole(text, 0)


def positive(text: str) -> int:
    """Take a whole number from 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text) if text.isdecimal() else float(text)  # a large one stays as it is
    except ValueError:
        number = -1
    if not least <= number < float("inf") or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {least}")
    return int(number)


def share(text: str) -> int | float:
    """Take a number from 1, or below it a share."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1, or a share such as 0.5")
    return int(number) if number >= 1 else number
