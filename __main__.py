"""The command line: `nopad inspect|doctor|generate|eval|lm_eval`, one module of cli/ each."""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "inspect": (
        "inspect_data",
        "lengths, fill rate, padding waste and a map of packs",
    ),
    "doctor": ("doctor", "does attention leak between documents? does generation match training?"),
    "generate": ("generate", "complete prompts with any HF checkpoint"),
    "eval": ("evaluate", "lm-evaluation-harness tasks on a checkpoint"),
    "lm_eval": ("lm_eval_command", "lm_eval's own command line, with the engine as --model nopad"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit status 2 and one line for errors that the user can fix."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    label = f"nopad {name}".rstrip()
    _prepare_stdout()
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
        raise ValueError(f"unknown command {argv[0]!r}; choose from {', '.join(COMMANDS)}")
    if sys.stdout is not None:
        sys.stdout.flush()  # a closed pipe or a full disk shows here, not when Python exits
    return status


def _print_help() -> int:
    print("usage: nopad COMMAND [options]   (nopad COMMAND --help for each)\n")
    print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
    print("\n  --version  the installed version")
    return 0


def _prepare_stdout() -> None:
    """Write UTF-8 in every locale, and nowhere if standard output is closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    sys.exit(main())
