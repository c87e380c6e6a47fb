"""Options that the recipes share, and the precedence of their values.

    default  <  settings of a resumed run  <  --config FILE.yaml  <  command line

The YAML file has lines `name: value` with the names of the options. A value is read as text, as on
the command line: `no` is "no", and 010 is not octal. null means no value.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from nopad.cli import (
    add_data_options,
    add_length_options,
    add_model_argument,
    attention_name,
    count,
    positive,
)
from nopad.recipes.support.run_dir import check_unchanged, find_run, read_settings

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML's words for an option that is on or off."""


def add_data_and_model_options(parser: argparse.ArgumentParser, budget: int) -> None:
    """Add the options of a pretraining recipe that choose data and model."""
    add = parser.add_argument_group("data and model").add_argument
    add_model_argument(add, "checkpoint, config.json or hub name; default: a small Llama", False)
    add("--data", help=".jsonl[.gz|.zst], .parquet or text file, folder of files, token file, "
        "saved `datasets` folder or hub name; default: Python's standard library")  # fmt: skip
    add("--tokenizer", help="folder or hub name; default: the model's, or a small built-in one")
    add_packing_options(add, budget)


def add_packing_options(add: Any, budget: int, overflow: str = "split") -> None:
    """Add the options of reading and packing that every recipe has."""
    add_data_options(add)
    add_length_options(add, budget, overflow)
    add("--workers", type=count, default=0, help="data loading processes per rank")
    add("--attention", type=attention_name, default="nopad",
        help="attention implementation: nopad, flash_attention_2, sdpa, ...")  # fmt: skip
    add("--sequence-parallel", type=positive, default=1, metavar="RANKS",
        help="ranks that share the tokens of each pack; or sp_size of accelerate")  # fmt: skip
    add("--seed", type=count, default=0, help="seed of new weights and of the order of packs")


def add_run_options(add: Any, recipe: str, save_every: int) -> None:
    """Add the options of the run folder, of resuming and of saving."""
    add("--output", type=lambda text: Path(text).expanduser(), metavar="FOLDER",
        help=f"folder of the run; default: the next unused runs/{recipe}-N")  # fmt: skip
    add("--resume", nargs="?", const="last", metavar="FOLDER",
        help="continue the run in this folder, with the settings it was started with; without "
        f"FOLDER: the run in --output, or the last of runs/{recipe}-N")  # fmt: skip
    add("--save-every", type=positive, default=save_every, help="steps between checkpoints")
    add("--config", type=Path, metavar="FILE.yaml", help="file with any of these options")


def parse_with_config(
    parser: argparse.ArgumentParser, argv: list[str] | None, recipe: str
) -> argparse.Namespace:
    """Parse `argv`, the YAML file that `--config` names, and the settings of a resumed run."""
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


def explicit_args(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Return the arguments that `argv` sets, without the defaults."""
    no_defaults = {action.dest: None for action in parser._actions if action.dest != "help"}
    values = vars(parser.parse_args(argv, argparse.Namespace(**no_defaults)))
    return {name: value for name, value in values.items() if value is not None}


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
        raise ValueError("--max-restarts needs --output, by which restarted workers find their run")
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if restarted and (explicit["output"] / "run.json").is_file():
        explicit["resume"] = str(explicit["output"])


def yaml_args(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the arguments that a YAML file sets, checked like those of the command line."""
    actions = {action.dest: action for action in parser._actions}
    argv = []
    for name, values in read_yaml(path).items():
        if name not in actions or name in ("config", "help"):
            raise ValueError(f"{path}: unknown setting {name}; see --help")
        argv += _to_argv(path, actions[name], values)
    parser.exit_on_error = False
    try:
        return explicit_args(parser, argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {error}") from None


def _to_argv(path: Path, action: argparse.Action, values: list[str]) -> list[str]:
    """Write the values of one name as command-line arguments."""
    if len(values) > 1 and not isinstance(action, argparse._AppendAction):
        raise ValueError(f"{path}: {action.dest} takes one value, not a list")
    if not values or not action.option_strings:
        return values
    if action.nargs == 0:
        if values[0].lower() not in WORDS:
            raise ValueError(f"{path}: {action.dest} is {values[0]}; it must be true or false")
        return [action.option_strings[0 if WORDS[values[0].lower()] else -1]]
    return [f"{action.option_strings[0]}={value}" for value in values]


def read_yaml(path: Path) -> dict[str, list[str]]:
    """Read the values of each name, as text; `learning-rate` and `learning_rate` are the same name.

    Only the nodes of the file are read, without building objects, so aliases cannot expand.
    """
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    settings: dict[str, list[str]] = {}
    for key, node in root.value if isinstance(root, yaml.MappingNode) else [(root, root)]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if key is node or not all(isinstance(each, yaml.ScalarNode) for each in (key, *nodes)):
            raise ValueError(f"{path} must consist of lines `name: value` or `name: [value, ...]`")
        name = key.value.replace("-", "_")
        if name in settings:
            raise ValueError(f"{path}: {name} appears twice: remove one")
        is_null = node.tag == "tag:yaml.org,2002:null"
        settings[name] = [] if is_null else [each.value for each in nodes]
    return settings
