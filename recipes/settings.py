"""Settings of a recipe: the command line, and a YAML file of the same names that it overrides.

python recipes/sft.py --config sft.yaml --learning-rate 1e-5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`; what `--config FILE` names becomes the defaults."""
    parser.add_argument("--config", type=Path, help="YAML file of these settings")
    known = {action.dest for action in parser._actions}
    first, _ = parser.parse_known_args(argv)
    if first.config is not None:
        given = read(first.config)
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"{first.config}: no settings {', '.join(unknown)}; see --help")
        parser.set_defaults(**given)
    return parser.parse_args(argv)


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
