"""The folder of a run: numbered checkpoints that appear whole or not at all.

runs/pretrain-1/run.json            what the run was started with
runs/pretrain-1/log.jsonl           loss, one line a step; rates at first and every tenth
runs/pretrain-1/checkpoint-50/      weights, optimizer, schedule, RNG, data position, tokenizer

A checkpoint is sealed and then renamed to its name; a torn or damaged one is passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

RUNS = Path("runs")
SAVED = ("run.json", "checkpoint-*", "*.ckpt", "*.safetensors")
"""What a run leaves in its folder, whichever trainer it runs on."""
NOT_KEPT = {"resume", "output", "config"}
FREE_TO_CHANGE = NOT_KEPT | {
    "workers", "devices", "accelerator", "strategy", "checkpointing", "save_every", "eval_every",
    "prompt", "log_every", "log_with", "keep",
}  # fmt: skip
"""By a resume: none changes the data's order, and `devices` alone how much of it a step learns."""


def run_options(add: Any, recipe: str) -> None:
    """Where a run lies, and whether it goes on."""
    add("--output", type=Path, help=f"folder of the run; without it, the next free runs/{recipe}-N")
    add("--resume", nargs="?", const="last", metavar="FOLDER",
        help="go on with a run, or the last, as it was started")  # fmt: skip


def run_to_resume(recipe: str, which: str, output: Path | None) -> Path:
    """The folder of the named run; of the last one, or of `--output`, where none is named."""
    path = Path(which) if which != "last" else output
    if path and output and path.resolve() != output.resolve():
        raise ValueError(f"--resume {path} and --output {output}: a run goes on in its own folder")
    if path is None:
        numbers = _numbers(RUNS, recipe)
        if not numbers:
            raise ValueError(f"no run to resume under {RUNS}/: start one without --resume")
        path = RUNS / f"{recipe}-{max(numbers)}"
    if not (path / "run.json").is_file():
        raise ValueError(f"{path} is no run folder (it has no run.json): name one of {RUNS}/")
    return path


def started_with(path: Path) -> dict[str, Any]:
    """The settings a run was started with."""
    try:
        found = json.loads((path / "run.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path / 'run.json'} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path / 'run.json'} is damaged: it holds no settings")
    return found


def refuse_changes(path: Path, before: dict[str, Any], said: dict[str, Any]) -> None:
    """Refuse settings under which a resumed run would be another one."""
    changed = []
    for name in [k for k in said if k not in FREE_TO_CHANGE]:
        if repr(before[name]) == repr(
            said[name]
        ):  # --add-eos 0 equals --add-eos none, which is False
            continue
        option = "--" + name.replace("_", "-")
        was = f"no {option}" if before[name] is None else f"{option} {before[name]}"
        changed.append(f"{was} (now {said[name]})")
    if changed:
        was = ", ".join(changed)
        raise ValueError(f"{path} was started with {was}: leave that out, or start a new run")


class RunFolder:
    """Choose, check and fill the folder of one run."""

    def __init__(self, path: Path, settings: dict, started: bool = False):
        self.path, self.settings, self.started = path, settings, started
        self.from_zero = False

    @classmethod
    def of(cls, recipe: str, args: argparse.Namespace) -> RunFolder:
        """The folder of the run that goes on, or of a new one; `args.output` is its path then.

        A run that was killed before its first checkpoint begins again: `args.resume` is None then.
        """
        settings = {k: v for k, v in vars(args).items() if k not in NOT_KEPT}
        folder = (
            cls(args.output, settings, started=True)
            if args.resume
            else cls.new(recipe, args.output, settings)
        )
        args.output = folder.path
        if args.resume and not folder.has_checkpoint():
            args.resume, folder.from_zero = None, True
        return folder

    @classmethod
    def new(cls, recipe: str, output: Path | None, settings: dict) -> RunFolder:
        """Take `output`, or the next free number; never a folder that holds a run already."""
        path = output or RUNS / f"{recipe}-{max([0, *_numbers(RUNS, recipe)]) + 1}"
        if any(found for pattern in SAVED for found in path.glob(pattern)):
            raise ValueError(
                f"{path} holds a run already: continue it with --resume {path}, "
                "choose another --output, or remove it"
            )
        return cls(path, settings)

    def start(self) -> None:
        """Create the folder and write down what the run is, if that is not done yet.

        On one rank, when all have met: none may find the folder taken by its own run.
        """
        if self.from_zero:
            from tqdm import tqdm

            tqdm.write(f"{self.path} has no checkpoint yet: it begins again, at step 0")
            self.forget_after(0)
            self.from_zero = False
        if self.started:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with (self.path / "run.json").open("x") as file:  # of two at once, one has it
                file.write(json.dumps(self.settings, indent=2) + "\n")
        except FileExistsError:
            raise ValueError(
                f"{self.path} was taken meanwhile by another run: start again, or name an --output"
            ) from None
        self.started = True

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def has_checkpoint(self) -> bool:
        """Whether any save of the run was finished, be it whole still or not."""
        from nopad.trainer.checkpoint_manifest import MANIFEST

        written = (f"checkpoint-*/{MANIFEST}", "*.ckpt", "*.safetensors")
        return any(found for pattern in written for found in self.path.glob(pattern))

    def last_step(self) -> int:
        """The step of the newest whole checkpoint."""
        from nopad.trainer.checkpoint_manifest import latest_intact_checkpoint

        return int(latest_intact_checkpoint(self.path).name.partition("-")[2])

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written until it is whole."""
        return self.path / f"unfinished-{step}"

    def begin(self) -> None:
        """Clear away what saves that were cut short have left."""
        for path in self.path.glob("unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)

    def finish(self, step: int, keep: int | None = None) -> None:
        """Seal the checkpoint, and let it appear under its name, in one rename.

        keep: how many stay, this one and those before it; without it, all. What lies after it was
        passed over by a resume, being damaged, and goes.
        """
        from nopad.trainer.checkpoint_manifest import write_manifest

        write_manifest(self.unfinished(step))
        shutil.rmtree(self.checkpoint(step), ignore_errors=True)
        self.unfinished(step).rename(self.checkpoint(step))
        steps = sorted(_numbers(self.path, "checkpoint"))
        upto = steps.index(step) + 1
        for old in steps[: max(0, upto - keep)] + steps[upto:] if keep else ():
            self.checkpoint(old).rename(self.unfinished(old))  # a kill leaves no half of it
            shutil.rmtree(self.unfinished(old), ignore_errors=True)

    def log(self, step: int, values: dict) -> None:
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop log lines of steps that a resumed run will take again, and torn ones."""
        path = self.path / "log.jsonl"
        if not path.exists():
            return
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        _write(path, "".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """The step of a log line; never, where a kill has torn it."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _numbers(folder: Path, recipe: str) -> list[int]:
    matches = (re.fullmatch(rf"{recipe}-(\d+)", path.name) for path in folder.glob(f"{recipe}-*"))
    return [int(match[1]) for match in matches if match]
