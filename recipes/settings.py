"""Settings of a recipe: the command line, and a YAML file of the same names that it overrides.

python recipes/sft.py --config sft.yaml --learning-rate 1e-5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tell defaults, but not that something is off or absent without its option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def count(text: str) -> int:
    """Read a number of things, of which there is at least one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, behind what `--config FILE` says."""
    parser.add_argument("--config", type=Path, help="YAML file of these settings")
    argv = sys.argv[1:] if argv is None else argv
    first, _ = parser.parse_known_args(argv)
    if first.config is None:
        return parser.parse_args(argv)
    known, words = {action.dest: action for action in parser._actions}, []
    for name, value in read(first.config).items():
        if name not in known:
            raise ValueError(f"{first.config}: no setting {name}; see --help")
        words += _words(known[name].option_strings[-1], value)
    return parser.parse_args([*words, *argv])


def _words(option: str, value: Any) -> list[str]:
    """Say a setting as one would on the command line.

    >>> _words("--budget", 512), _words("--compile", True), _words("--prompt", ["a", "b"])
    (['--budget=512'], ['--compile'], ['--prompt=a', '--prompt=b'])
    """
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    return [f"{option}={one}" for one in (value if isinstance(value, list) else [value])]


def read(path: Path) -> dict[str, Any]:
    """Read a flat YAML file, `learning-rate` and `learning_rate` alike."""
    import yaml

    found = yaml.safe_load(path.read_text()) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


class Training:
    """Whether the first step was begun: what goes wrong before it is for the user to mend."""

    begun = False


def exit_status(recipe: str, main: Callable[[list[str] | None], None], argv: Any = None) -> int:
    """Run a recipe; what its user can mend becomes one line and status 2.

    An error in the middle of training keeps its traceback.
    """
    Training.begun = False
    try:
        main(argv)
    except (ValueError, OSError) as error:
        if Training.begun:
            raise
        print(f"{recipe}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
