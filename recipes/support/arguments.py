"""Parse a recipe's arguments: the command line, and a YAML file with the same names.

nopad sft --config sft.yaml --learning-rate 1e-5

An argument on the command line overrides the one in the YAML file. With `--resume`, both override
the settings that the run was started with; without any of them, the default applies. Workers that
torchrun has restarted resume the run in their `--output`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from nopad.recipes.support.run_dir import check_unchanged, find_run, read_settings

TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")
"""The words of YAML for an option that is on or off."""


def parse_with_config(
    parser: argparse.ArgumentParser, argv: list[str] | None, recipe: str
) -> argparse.Namespace:
    """Parse `argv`, the YAML file that `--config` names, and the settings of a resumed run."""
    parser.add_argument("--config", type=Path, help="YAML file with any of these arguments")
    explicit = explicit_args(parser, sys.argv[1:] if argv is None else argv)
    if "config" in explicit:
        explicit = yaml_args(explicit["config"], parser) | explicit
    settings = vars(parser.parse_args([]))
    resume_if_restarted(explicit)
    if explicit.get("resume") is not None:
        path = find_run(recipe, explicit["resume"], explicit.get("output"))
        settings |= {k: v for k, v in read_settings(path).items() if k in settings}
        check_unchanged(path, settings, explicit)
        explicit["output"] = path
    return argparse.Namespace(**settings | explicit)


def resume_if_restarted(explicit: dict[str, Any]) -> None:
    """Set `resume` in a worker that torchrun has started again, if its run has a folder already."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) < 1:
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
        raise ValueError(
            "--max-restarts: restarted workers would connect to dead ones; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and pass --rdzv-backend=c10d to torchrun"
        )
    if "resume" in explicit:
        return
    if "output" not in explicit:
        raise ValueError(
            "--max-restarts needs --output: workers that are restarted find their run by its folder"
        )
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if restarted and (explicit["output"] / "run.json").is_file():
        explicit["resume"] = str(explicit["output"])


def explicit_args(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Return the arguments that `argv` sets, without the defaults."""
    no_defaults = {action.dest: None for action in parser._actions if action.dest != "help"}
    values = vars(parser.parse_args(argv, argparse.Namespace(**no_defaults)))
    return {name: value for name, value in values.items() if value is not None}


def yaml_args(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the arguments that a YAML file sets.

    null stands for the default; false does too, for an option that can be switched off.
    """
    hidden = argparse.SUPPRESS  # options of earlier versions
    actions = {a.dest: a for a in parser._actions if a.dest != "help" and a.help is not hidden}
    argv, defaults = [], {}
    for name, value in read_yaml(path).items():
        if name not in actions:
            raise ValueError(f"{path}: unknown setting {name}; see --help")
        if name == "config":
            raise ValueError(f"{path}: a settings file cannot name another with config")
        action = actions[name]
        if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
            raise ValueError(f"{path}: {name} takes one value, not a list")
        if isinstance(value, list) and (not value or None in value):
            raise ValueError(f"{path}: {name} is a list without values, or with null in it")
        if value is None or (_is_switch(action) and _is(value, FALSE)):
            defaults[name] = action.default
        else:
            argv += _to_argv(path, action, value)
    return _explicit_of_yaml(path, parser, argv) | defaults


def _explicit_of_yaml(
    path: Path, parser: argparse.ArgumentParser, argv: list[str]
) -> dict[str, Any]:
    """Parse the values of a file; a wrong one is told with the file's name."""
    before, parser.exit_on_error = parser.exit_on_error, False
    try:
        return explicit_args(parser, argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {error}") from None
    finally:
        parser.exit_on_error = before


def _to_argv(path: Path, action: argparse.Action, value: str | list[str]) -> list[str]:
    """Write a value, as it stands in the file, as command-line arguments."""
    if not action.option_strings:
        return [str(value)]
    option = action.option_strings[-1]
    if _is_switch(action) and _is(value, TRUE):
        return [option]
    if action.nargs == 0:
        raise ValueError(f"{path}: {action.dest} is {value}; it must be true or false")
    return [f"{option}={item}" for item in (value if isinstance(value, list) else [value])]


def _is_switch(action: argparse.Action) -> bool:
    """Return whether an option may stand without a value."""
    return bool(action.option_strings) and action.nargs in (0, "?")


def _is(value: str | list[str], words: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value.lower() in words


def read_yaml(path: Path) -> dict[str, str | list[str] | None]:
    """Read a flat YAML file; `learning-rate` and `learning_rate` are the same name.

    Values keep the text they have in the file, as on the command line: `no` is no, and 010 is not
    octal. Only null is None.
    """
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
    """Return a safe YAML loader of texts and nulls.

    It has no aliases, which can grow a few bytes without bound.
    """
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

    for kind in ("bool", "int", "float", "timestamp"):
        FlatLoader.add_constructor(f"tag:yaml.org,2002:{kind}", FlatLoader.construct_scalar)
    return FlatLoader
