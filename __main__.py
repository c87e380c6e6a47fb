"""`nopad COMMAND`: run the module of a command in cli/, or that of a training run in recipes/."""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "inspect": (
        "inspect_data",
        "lengths, fill rate, padding waste and a map of packs",
    ),
    "tokenize": ("tokenize_data", "tokenize data once, for all runs that train on it"),
    "doctor": ("doctor", "does attention leak between documents? does generation match training?"),
    "generate": ("generate", "complete prompts with any HF checkpoint"),
    "serve": ("serve", "an OpenAI-compatible HTTP server on a checkpoint"),
    "eval": ("evaluate", "lm-evaluation-harness tasks on a checkpoint"),
}

RECIPES = {
    "pretrain": ("pretrain", "pretrain with Accelerate, and evaluate by generation"),
    "sft": ("sft", "fine-tune a chat model on conversations"),
    "train-hf": ("train_hf", "pretrain with the HF Trainer"),
    "pretrain-lightning": ("pretrain_lightning", "pretrain with Lightning"),
    "grpo": ("grpo", "reinforcement learning on sums, with rollouts from the live model"),
    "dpo": ("dpo", "learn from pairs of a preferred and a rejected answer"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit status 2 and one line for errors that the user can fix."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    label = f"nopad {name}".rstrip()
    _prepare_stdout()
    if argv and argv[0] in RECIPES:
        return _run_recipe(argv[0], argv[1:])
    try:
        return _dispatch(name, argv)
    except BrokenPipeError:  # the reader, `head` for instance, has closed the pipe
        sys.stdout = None
        return 141  # as a program ended by SIGPIPE
    except (ValueError, OSError, ImportError) as error:
        from .cli.terminal import printable

        message = " ".join(str(error).split()) or type(error).__name__
        print(printable(f"{label}: {message}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{label}: interrupted", file=sys.stderr)
        return 130


def _run_recipe(name: str, argv: list[str]) -> int:
    """Run a recipe, whose errors during training keep their traceback."""
    from .recipes.support.run_recipe import run_recipe

    module = importlib.import_module(f".recipes.{RECIPES[name][0]}", __package__)
    return run_recipe(RECIPES[name][0], module.parse_args, module.train, argv)


def _dispatch(name: str, argv: list[str]) -> int:
    if name:
        module = importlib.import_module(f".cli.{COMMANDS[name][0]}", __package__)
        status = module.main(argv[1:])
    elif not argv or argv[0] in ("-h", "--help"):
        status = _print_help()
    elif argv[0] == "--version":
        from . import __version__

        print(f"nopad {__version__}")
        status = 0
    else:
        names = ", ".join((*COMMANDS, *RECIPES))
        raise ValueError(f"unknown command {argv[0]!r}; choose from {names}")
    if sys.stdout is not None:
        sys.stdout.flush()  # a closed pipe or a full disk shows here, not when Python exits
    return status


def _print_help() -> int:
    from .cli.terminal import console

    out = console()
    out.print("usage: nopad COMMAND [options]   (nopad COMMAND --help for each)")
    for title, commands in (("data, models and generation", COMMANDS), ("training", RECIPES)):
        out.print(f"\n{title}", style="bold")
        for name, (_, what) in commands.items():
            out.print(f"  {name:19}", style="cyan", end="")
            out.print(f"{what}")
    out.print("\nTraining runs on several devices with accelerate launch -m nopad COMMAND ...")
    out.print("  --version          the installed version")
    return 0


def _prepare_stdout() -> None:
    """Write UTF-8 in every locale, and nowhere if standard output is closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    sys.exit(main())
