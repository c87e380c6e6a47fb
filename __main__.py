"""The command line: `nopad inspect|doctor|generate|eval|lm_eval`, one module of cli/ each."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "inspect": (
        "inspect_data",
        "what packing does to a data set: lengths, fill, waste, a pack map",
    ),
    "doctor": ("doctor", "does a model keep packed documents apart, and paged ≡ packed?"),
    "generate": ("generate", "complete prompts with any HF checkpoint through the engine"),
    "eval": ("evaluate", "tasks of lm-evaluation-harness on a checkpoint, through the engine"),
    "lm_eval": ("lm_eval_command", "lm_eval's own command line, with the engine as --model nopad"),
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a command; exit status 2 for what the user can mend, in one line."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: nopad COMMAND [options]   (nopad COMMAND --help for each)\n")
        print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
        print("\n  --version  which nopad this is")
        return 0
    if argv[0] == "--version":
        from . import __version__

        print(f"nopad {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"nopad: no command {argv[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f".cli.{COMMANDS[argv[0]][0]}", __package__).main(argv[1:])
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read, as `head` does, has read enough
            sys.stdout = None
            return 141  # as of a program that SIGPIPE ends
        print(f"nopad {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"nopad {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
