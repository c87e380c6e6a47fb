"""Options that commands and recipes share: help format, data and model options, argument types."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
PLOT_SUFFIXES = (".svg", ".png", ".pdf")
ARGUMENT = re.compile(
    r"""(?<![\w/])(add_eos|attn_implementation|budget|device|dtype|format|glob|max_length|"""
    r"""max_steps|memory|num_train_epochs|on_error|overflow|text_column|tokenizer)="""
    r"""(?:"([^"]+)"|('[^']+'|-?\w+(?:\.\d+)?))?"""
)
"""A Python keyword argument in a message, with its value if there is one."""
PYTHON_ADVICE = {
    "pass a function as format=": "convert the rows to text or messages first",
    "; check=False skips this check": "",
}
"""Advice that has no command-line option, and its replacement."""
ROW_FORMATS = ("alpaca", "sharegpt")
OVERFLOWS = ("split", "truncate", "drop", "error")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of descriptions, and show informative defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Compare False by identity: it equals 0, which is a default worth showing.
        if action.default is False or action.default in (None, [], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


def parser(name: str, arguments: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for `nopad NAME`.

    arguments: what follows the name in the usage, such as `MODEL [options]`.
    doc: the docstring of the command's module, which is the description.
    """
    text = (doc or "").replace("`", "").strip()
    return argparse.ArgumentParser(
        f"nopad {name}",
        f"nopad {name} {arguments}",
        description=text,
        formatter_class=HelpFormatter,
    )


def add_model_argument(add: Any, what: str, required: bool = True) -> None:
    """Add MODEL, the first argument of every command that has a model."""
    add("model", metavar="MODEL", nargs=None if required else "?", help=what)


def add_model_options(add: Any) -> None:
    """Add the options of a model's tokenizer, dtype and device."""
    add("--tokenizer", help="folder or hub name; default: the model's")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights")
    add("--device", help="cuda, cuda:1, cpu ...; default: a GPU if there is one")


def add_data_options(add: Any) -> None:
    """Add the options of reading data, except its path."""
    add("--text-column", default="text", help="column with the text")
    add("--format", choices=ROW_FORMATS,
        help="layout of the rows: alpaca (instruction, input, output) or sharegpt (conversations); "
        "default: text, messages, prompt and completion, or input_ids")  # fmt: skip
    add("--glob", help="files to read in a folder, such as '*.jsonl'")
    add("--on-error", default="raise", choices=("raise", "skip"),
        help="stop at a row that cannot be used, or skip it")  # fmt: skip
    add(
        "--add-eos", type=_eos,
        help="token id that ends every document, or none; default: the tokenizer's"
    )  # fmt: skip
    add("--dtype", choices=("uint16", "uint32"), help="dtype of the tokens in a flat .bin file")


def add_length_options(add: Any, budget: int, overflow: str) -> None:
    """Add the options of the lengths of packs and samples."""
    add("--budget", type=positive, default=budget, help="maximum tokens per pack")
    add("--max-length", type=positive,
        help="maximum tokens per sample, if fewer than --budget")  # fmt: skip
    add("--overflow", default=overflow, choices=OVERFLOWS,
        help="what to do with a longer sample")  # fmt: skip


def length_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of lengths as arguments of `PackedDataset`."""
    if args.max_length is not None and args.max_length > args.budget:
        raise ValueError(
            f"--max-length {args.max_length} is longer than a pack of --budget {args.budget}: "
            "omit it, or raise --budget"
        )
    return {"budget": args.budget, "max_length": args.max_length, "overflow": args.overflow}


def data_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the data options as arguments of `PackedDataset`; raise for one without effect."""
    if args.data and (path := Path(os.path.expanduser(args.data))).is_file():
        if args.glob is not None:
            raise ValueError(f"--glob {args.glob}: {args.data} is a file; pass its folder")
        if args.dtype is not None and path.suffix != ".bin":
            raise ValueError(f"--dtype {args.dtype} is for flat .bin files; omit it")
    add_eos = True if args.add_eos is None else args.add_eos
    return {
        "text_column": args.text_column,
        "format": args.format,
        "glob": args.glob,
        "on_error": args.on_error,
        "add_eos": add_eos,
        "dtype": args.dtype,
    }


def as_cli_message(message: object, **renamed: str) -> str:
    """Replace the Python arguments in a message by command-line options.

    renamed: options that have another name than the argument.

    >>> as_cli_message('no eos: pass add_eos= an id, or add_eos=False (on_error="skip" skips it)')
    'no eos: pass --add-eos an id, or --add-eos none (--on-error skip skips it)'
    """

    def option(match: re.Match) -> str:
        name, value = match[1], match[2] or match[3]
        flag = "--" + str(renamed.get(name, name)).replace("_", "-")
        return f"{flag} {'none' if value == 'False' else value}" if value else flag

    text = str(message)
    for advice, instead in PYTHON_ADVICE.items():
        text = text.replace(advice, instead)
    text = re.sub(r"PackedDataset\((\w+=[^()]*)\)", r"\1", text)
    return ARGUMENT.sub(option, text)


def _eos(text: str) -> int | bool:
    if text == "none":
        return False
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: pass a token id, or none")
    return int(text)


def attention_name(name: str) -> str:
    """Check an attention implementation: one that Transformers knows, or one of the hub (a/b)."""
    if name == "nopad":  # the default, checked without loading Transformers
        return name
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ..attention.hf import ATTN_IMPLEMENTATION

    known = sorted({"eager", ATTN_IMPLEMENTATION, *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if name not in known and "/" not in name:
        message = f"{name!r} is not an attention implementation; choose from {', '.join(known)}"
        raise argparse.ArgumentTypeError(message)
    return name


def writable_path(text: str) -> Path:
    """Return a path to write to; create its folder, or raise now instead of after an hour."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: pass a file")
    path = Path(os.path.expanduser(text))
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder: pass a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"{text[:40]}...: the name is too long") from None
        message = f"{text}: {path.parent} is not a folder and cannot be created"
        raise argparse.ArgumentTypeError(message) from None
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        message = f"{text} is not writable ({error.strerror})"
        raise argparse.ArgumentTypeError(message) from None
    if not existed:
        path.unlink()  # a run that fails leaves no empty file
    return path


def plot_path(text: str) -> Path:
    """Return a path to write a plot to; raise now if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib")
    if Path(text).suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: pass a name in {', '.join(PLOT_SUFFIXES)}")
    return writable_path(text)


def count(text: str) -> int:
    """Parse an integer from 0.

    >>> count("1e3"), count("12")
    (1000, 12)
    """
    return _integer(text, 0)


def positive(text: str) -> int:
    """Parse an integer >= 1."""
    return _integer(text, 1)


def _integer(text: str, minimum: int) -> int:
    try:
        number = int(text) if text.isdecimal() else float(text)  # int: large numbers stay exact
    except ValueError:
        number = -1
    if not minimum <= number < float("inf") or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r}: pass an integer >= {minimum}")
    if number > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text!r}: pass an integer <= {sys.maxsize}")
    return int(number)


def number_from_0(text: str) -> float:
    """Parse a finite number >= 0."""
    number = _float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: pass a number >= 0")
    return number


def number_above_0(text: str) -> float:
    """Parse a number above 0; inf means no limit."""
    number = _float(text)
    if not number > 0:  # also true for NaN
        raise argparse.ArgumentTypeError(f"{text!r}: pass a number above 0")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def count_or_fraction(text: str) -> int | float:
    """Parse an integer >= 1, or a fraction below 1."""
    number = _float(text)
    if not 0 < number < float("inf") or (number > 1 and number != int(number)):
        raise argparse.ArgumentTypeError(f"{text!r}: pass an integer >= 1, or a fraction below 1")
    return int(number) if number >= 1 else number


def memory_size(text: str) -> int | float:
    """Argument type: bytes, or a fraction of the free memory."""
    try:
        memory = int(text) if text.isdecimal() else float(text)
        if 0 < memory < float("inf"):
            return memory
        raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: pass bytes, or a fraction of the free memory such as 0.5"
        ) from None
