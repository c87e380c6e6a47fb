"""Load models, tokenizers and chat templates that are named on the command line.

The functions are those of `nopad.inference.pretrained`, imported late because it loads torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from .options import as_cli_message


def _on_call(name: str) -> Callable[..., Any]:
    """Return a function of `nopad.inference.pretrained` that is imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(import_module("nopad.inference.pretrained"), name)
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise ValueError(as_cli_message(error)) from None

    call.__name__ = call.__qualname__ = name
    return call


checkpoint_path = _on_call("checkpoint_path")
has_weights = _on_call("has_weights")
hide_progress_bars = _on_call("hide_progress_bars")
is_adapter = _on_call("is_adapter")
load_model = _on_call("load_model")
load_tokenizer = _on_call("load_tokenizer")
load_weights = _on_call("load_weights")
resolve_path = _on_call("resolve_path")
short_error = _on_call("short_error")


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn an error of loading a model, which may be of any type, into one line that names it."""
    try:
        yield
    except ImportError:
        raise  # names what to install
    except Exception as error:
        raise ValueError(f"cannot load {name}: {short_error(error)}") from error


def add_chat_template_option(add: Any) -> None:
    """Add the option of a file with a chat template."""
    add("--chat-template", help="Jinja file, for a tokenizer without a chat template")


def set_chat_template(tokenizer: Any, path: str) -> None:
    """Give a tokenizer the chat template of a file."""
    try:
        tokenizer.chat_template = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from None


def check_chat_template(tokenizer: Any) -> None:
    """Raise ValueError if --chat is given for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer has no chat template")
