"""The command line: `nopad inspect|doctor|generate|eval|lm_eval`, one module of cli/ each."""

from __future__ import annotations

import importlib
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
    """Dispatch to a command; exit status 2 and one line for errors that the user can fix."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: nopad COMMAND [options]   (nopad COMMAND --help for each)\n")
        print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
        print("\n  --version  the installed version")
        return 0
    if argv[0] == "--version":
        from . import __version__

        print(f"nopad {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(
            f"nopad: unknown command {argv[0]!r}; choose from {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        return importlib.import_module(f".cli.{COMMANDS[argv[0]][0]}", __package__).main(argv[1:])
    except (ValueError, OSError, ImportError) as error:
        if isinstance(
            error, BrokenPipeError
        ):  # the reader, `head` for instance, has closed the pipe
            sys.stdout = None
            return 141  # as a program ended by SIGPIPE
        from .cli.terminal import printable

        print(printable(f"nopad {argv[0]}: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"nopad {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
