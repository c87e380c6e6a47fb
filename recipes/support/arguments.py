"""Parse a recipe's arguments: the command line, and a YAML file with the same names.

python recipes/sft.py --config sft.yaml --learning-rate 1e-5

An argument on the command line overrides the one in the YAML file. With `--resume`, both override
the settings that the run was started with; without any of them, the default applies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nopad.recipes.support.run_dir import check_unchanged, find_run, read_settings


def parse_with_config(
    parser: argparse.ArgumentParser, argv: list[str] | None, recipe: str
) -> argparse.Namespace:
    """Parse `argv`, the YAML file that `--config` names, and the settings of a resumed run."""
    parser.add_argument("--config", type=Path, help="YAML file with any of these arguments")
    explicit = explicit_args(parser, sys.argv[1:] if argv is None else argv)
    if "config" in explicit:
        explicit = yaml_args(explicit["config"], parser) | explicit
    settings = vars(parser.parse_args([]))
    if explicit.get("resume"):
        path = find_run(recipe, explicit["resume"], explicit.get("output"))
        settings |= {k: v for k, v in read_settings(path).items() if k in settings}
        check_unchanged(path, settings, explicit)
        explicit["output"] = path
    return argparse.Namespace(**settings | explicit)


def explicit_args(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Return the arguments that `argv` sets, without the defaults."""
    no_defaults = {action.dest: None for action in parser._actions if action.dest != "help"}
    values = vars(parser.parse_args(argv, argparse.Namespace(**no_defaults)))
    return {name: value for name, value in values.items() if value is not None}


def yaml_args(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the arguments that a YAML file sets.

    null stands for the default; false does too, for an option that can be switched off.
    """
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    argv, defaults = [], {}
    for name, value in read_yaml(path).items():
        if name not in actions:
            raise ValueError(f"{path}: unknown setting {name}; see --help")
        if value is False and actions[name].nargs not in (0, "?"):
            raise ValueError(f"{path}: {name} cannot be false; see --help")
        if value is None or value is False:
            defaults[name] = actions[name].default
        else:
            argv += _to_argv(actions[name].option_strings[-1], value)
    return explicit_args(parser, argv) | defaults


def _to_argv(option: str, value: Any) -> list[str]:
    """Write a YAML value as command-line arguments.

    >>> _to_argv("--budget", 512), _to_argv("--compile", True), _to_argv("--prompt", ["a", "b"])
    (['--budget=512'], ['--compile'], ['--prompt=a', '--prompt=b'])
    """
    if value is True:
        return [option]
    return [f"{option}={item}" for item in (value if isinstance(value, list) else [value])]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a flat YAML file; `learning-rate` and `learning_rate` are the same name."""
    import yaml

    try:
        settings = _flat_loader()(path.read_text(encoding="utf-8")).get_single_data() or {}
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: write `name: value` lines") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{line} is not valid YAML: {problem or error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must consist of `name: value` lines")
    named: dict[str, Any] = {}
    for name, value in settings.items():
        key = str(name).replace("-", "_")
        if key in named:
            raise ValueError(f"{path}: {key} appears twice: remove one")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, list | dict) for item in values):
            raise ValueError(f"{path}: {key} must be a value or a list of values")
        named[key] = value
    return named


def _flat_loader() -> Any:
    """Return a safe YAML loader without aliases, which can grow a few bytes without bound."""
    import yaml

    class FlatLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                mark = node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{twice} appears twice", mark)
            return super().construct_mapping(node, deep)

    return FlatLoader
