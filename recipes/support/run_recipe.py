"""Run a recipe: exit status, errors that the user can fix in one line, signals.

An error before the first training step, which the user can fix, is printed in one line, with status
2; a training that diverged too, with status 1. Other errors during training keep their traceback.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from nopad.cli import as_cli_message, printable
from nopad.recipes.support.run_dir import RunDir
from tqdm import tqdm

ParseArgs = Callable[[list[str] | None], argparse.Namespace]
Train = Callable[[argparse.Namespace, RunDir], None]
RENAMED = {"attn_implementation": "attention", "max_steps": "steps", "num_train_epochs": "epochs"}
"""Arguments named in library errors, and their names in the recipes."""


def run_recipe(recipe: str, parse_args: ParseArgs, train: Train, argv: list | None = None) -> int:
    """Run a recipe as the last action of this process; return the exit status."""
    status = exit_status(recipe, parse_args, train, argv)
    if status == 0:
        from nopad.runtime import destroy_group  # imported late: loads torch
        from nopad.trainer import STOP_SIGNALS

        for number in STOP_SIGNALS:  # all is saved: a late signal must not end it as a failure
            signal.signal(number, signal.SIG_IGN)
        destroy_group()
    return status


def exit_status(recipe: str, parse_args: ParseArgs, train: Train, argv: list | None = None) -> int:
    """Run a recipe; print an error that the user can fix as one line and return 2 or 1."""
    run = None
    try:
        args = parse_args(argv)
        run = RunDir(recipe, args)
        _train(train, args, run)
    except (ValueError, OSError, ImportError) as error:
        if (run is not None and run.training_started) or is_our_bug(error):
            raise
        print(f"{recipe}: {printable(user_message(error))}", file=sys.stderr)
        return 2
    except FloatingPointError as error:  # the trainers' `NonFiniteError`
        tqdm.write(f"{recipe}: {error}", file=sys.stderr)  # above an open progress bar
        return 1
    return 0


def _train(train: Train, args: argparse.Namespace, run: RunDir) -> None:
    """Train; signals wait for the trainer's own `StopRequest`, or for the end of the last save."""
    from nopad.trainer import StopRequest

    request = StopRequest()
    try:
        train(args, run)
    finally:
        request.release()


def is_our_bug(error: Exception) -> bool:
    """Whether an import failed although the package is installed: installing cannot fix it."""
    if not isinstance(error, ImportError) or error.name is None:
        return False
    return error.name.startswith("nopad") or not isinstance(error, ModuleNotFoundError)


def user_message(error: Exception) -> str:
    """Rewrite an error's text in terms of command-line options, in one line.

    >>> user_message(ModuleNotFoundError("No module named 'peft'", name="peft"))
    "No module named 'peft': pip install peft"
    """
    message = " ".join(as_cli_message(error, **RENAMED).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{message}: pip install {error.name.partition('.')[0]}"
    return message.replace("set its chat_template", "pass --chat-template FILE to nopad sft")
