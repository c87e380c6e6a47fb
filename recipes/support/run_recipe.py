"""Entry point of recipes: exit status, one-line user errors, signals during shutdown.

An error before the first training step is the user's to fix: it is printed as one line, and the
exit status is 2. A training that diverged is told in one line, with 1. Any other error during
training keeps its traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nopad.cli import as_cli_message, printable
from nopad.recipes.support.run_dir import RunProgress

Main = Callable[[list[str] | None, RunProgress], None]

RENAMED = {
    "attn_implementation": "attention",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
}
"""Arguments named in library errors, and what the recipes call them."""
EXTRAS = {"lightning": "lightning", "peft": "lora", "FlashAttention2": "flash"}
"""Packages as import errors name them, and the extra that installs each."""


def run_recipe(recipe: str, main: Main, argv: list[str] | None = None) -> int:
    """Run a recipe as the last action of this process; return the exit status."""
    status = exit_status(recipe, main, argv)
    if status == 0:
        from nopad.runtime import destroy_group  # imported late: loads torch
        from nopad.trainer import STOP_SIGNALS

        for (
            number
        ) in STOP_SIGNALS:  # all is saved: a late signal must not turn success into failure
            signal.signal(number, signal.SIG_IGN)
        destroy_group()
    return status


def exit_status(recipe: str, main: Main, argv: list[str] | None = None) -> int:
    """Run a recipe; print an error that the user can fix as one line and return 2 or 1."""
    progress = RunProgress()
    try:
        main(argv, progress)
    except (ValueError, OSError, ImportError) as error:
        if progress.training_started or is_our_bug(error):
            raise
        message = printable(" ".join(user_message(error).split()))
        print(f"{recipe}: {message}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        from nopad.trainer.monitoring import NonFiniteError
        from tqdm import tqdm

        if not isinstance(error, NonFiniteError):
            raise
        tqdm.write(f"{recipe}: {error}", file=sys.stderr)  # above an open progress bar
        return 1
    return 0


def is_our_bug(error: Exception) -> bool:
    """Whether an import failed although the package is installed: installing cannot fix it."""
    if not isinstance(error, ImportError) or error.name is None:
        return False
    return error.name.startswith("nopad") or not isinstance(error, ModuleNotFoundError)


def user_message(error: Exception) -> str:
    """Rewrite an error's text in terms of command-line options.

    >>> user_message(ImportError("No module named 'peft'"))
    "No module named 'peft': pip install 'nopad[lora]'"
    """
    message = as_cli_message(error, **RENAMED)
    if isinstance(error, ImportError):
        extra = next((extra for package, extra in EXTRAS.items() if package in message), None)
        return f"{message.rstrip('.')}: pip install 'nopad[{extra}]'" if extra else message
    return message.replace("set its chat_template", "pass --chat-template FILE to nopad sft")


@contextmanager
def as_user_error(error_type: type[Exception]) -> Iterator[None]:
    """Convert errors of a library's own type to ValueError, which users see as one line."""
    try:
        yield
    except error_type as error:
        raise ValueError(error) from error


@contextmanager
def hold_signals() -> Iterator[None]:
    """Keep signals from interrupting the final save, after the trainer's callback released them.

    Enter this before that callback is constructed: the callback restores these handlers.
    """
    from nopad.trainer import StopRequest

    message = b"\ntraining is over: exiting after the save; a second signal exits at once\n"
    request = StopRequest(message)
    try:
        yield
    finally:
        request.release()
