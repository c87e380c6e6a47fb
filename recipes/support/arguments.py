"""Settings of a recipe: the command line, and a YAML file of the same names that it overrides.

python recipes/sft.py --config sft.yaml --learning-rate 1e-5

A run that is resumed takes what neither of them says from what it was started with.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nopad.cli import as_cli_message
from nopad.recipes.support.run_dir import refuse_changes, run_to_resume, started_with

RENAMED = {
    "attn_implementation": "attention",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
}
"""What recipes call the arguments that errors name."""
EXTRAS = {"lightning": "lightning", "peft": "lora", "FlashAttention2": "flash"}
"""What an error calls a package that may be lacking, and the extra that brings it."""


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, recipe: str
) -> argparse.Namespace:
    """Parse `argv`, whose settings take the place of those that `--config FILE` names.

    With `--resume`, both take the place of what that run of the recipe was started with.
    """
    parser.add_argument("--config", type=Path, help="YAML file of these settings")
    said = _said(parser, sys.argv[1:] if argv is None else argv)
    if "config" in said:
        said = _said_by(said["config"], parser) | said
    settings = vars(parser.parse_args([]))
    if said.get("resume"):
        path = run_to_resume(recipe, said["resume"], said.get("output"))
        settings |= {k: v for k, v in started_with(path).items() if k in settings}
        refuse_changes(path, settings, said)
        said["output"] = path
    return argparse.Namespace(**settings | said)


def _said(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """The settings that `argv` names, none of the defaults."""
    nothing = {action.dest: None for action in parser._actions if action.dest != "help"}
    found = vars(parser.parse_args(argv, argparse.Namespace(**nothing)))
    return {name: value for name, value in found.items() if value is not None}


def _said_by(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The settings that a YAML file names; null is the default, and false that of a switch."""
    known = {action.dest: action for action in parser._actions if action.dest != "help"}
    words, unset = [], {}
    for name, value in read(path).items():
        if name not in known:
            raise ValueError(f"{path}: no setting {name}; see --help")
        if value is False and known[name].nargs not in (0, "?"):
            raise ValueError(f"{path}: {name} cannot be false; see --help")
        if value is None or value is False:
            unset[name] = known[name].default
        else:
            words += _words(known[name].option_strings[-1], value)
    return _said(parser, words) | unset


def _words(option: str, value: Any) -> list[str]:
    """Say a setting as one would on the command line.

    >>> _words("--budget", 512), _words("--compile", True), _words("--prompt", ["a", "b"])
    (['--budget=512'], ['--compile'], ['--prompt=a', '--prompt=b'])
    """
    if value is True:
        return [option]
    return [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]


def read(path: Path) -> dict[str, Any]:
    """Read a flat YAML file, `learning-rate` and `learning_rate` alike."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{line} is no YAML: {why or error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


class Training:
    """Whether the first step was begun: what goes wrong before it is for the user to mend."""

    begun = False


@contextmanager
def heard_to_the_end() -> Iterator[None]:
    """Let no signal cut the last save short: a trainer's callback hears them until then.

    Enter it right before that callback is made, which gives the signals back to it.
    """
    from nopad.trainer.graceful_stop import StopRequest

    said = b"\nno step is left: the run ends when it is saved; a second signal leaves at once\n"
    request = StopRequest(said)
    try:
        yield
    finally:
        request.release()


@contextmanager
def mendable(kind: type[Exception]) -> Iterator[None]:
    """Let an error of this kind count among those that the user can mend."""
    try:
        yield
    except kind as error:
        raise ValueError(error) from error


def exit_status(recipe: str, main: Callable[[list[str] | None], None], argv: Any = None) -> int:
    """Run a recipe; what its user can mend becomes one line and status 2.

    An error in the middle of training keeps its traceback.
    """
    Training.begun = False
    try:
        main(argv)
    except (ValueError, OSError, ImportError) as error:
        if Training.begun or _ours(error):
            raise
        print(f"{recipe}: {' '.join(_told(error).split())}", file=sys.stderr)
        return 2
    return 0


def _ours(error: Exception) -> bool:
    """Whether no package is lacking but a name inside one: nothing that its user can mend."""
    if not isinstance(error, ImportError) or error.name is None:
        return False
    return error.name.startswith("nopad") or not isinstance(error, ModuleNotFoundError)


def _told(error: Exception) -> str:
    """What an error says, in words of the command line.

    >>> _told(ImportError("No module named 'peft'"))
    "No module named 'peft': pip install 'nopad[lora]'"
    """
    told = as_cli_message(error, **RENAMED)
    if isinstance(error, ImportError):
        extra = next((extra for package, extra in EXTRAS.items() if package in told), None)
        return f"{told.rstrip('.')}: pip install 'nopad[{extra}]'" if extra else told
    return told.replace("set its chat_template", "give sft.py --chat-template FILE")


def run_recipe(recipe: str, main: Callable[[list[str] | None], None], argv: Any = None) -> int:
    """Run a recipe as a program whose last act this is; return its exit status."""
    status = exit_status(recipe, main, argv)
    if status == 0:
        from nopad.runtime import destroy_group  # here: torch is loaded by now
        from nopad.trainer.graceful_stop import SIGNALS

        for number in SIGNALS:  # all is saved: a late one must not make a failure of it
            signal.signal(number, signal.SIG_IGN)
        destroy_group()
    return status
