"""The folder of a run: its settings, a lock, logs and checkpoints.

runs/pretrain-1/run.json            the settings that the run was started with
runs/pretrain-1/run.lock            locked while a process trains in the folder
runs/pretrain-1/log.jsonl           loss and tokens of every step, rates of every tenth (pretrain)
runs/pretrain-1/eval.jsonl          the metrics of every evaluation (pretrain)
runs/pretrain-1/checkpoint-50/      weights, optimizer, schedule, RNG, data position, tokenizer

The folder is created with the first training step: a run that is refused leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

RUNS_DIR = Path("runs")
TRAIN_LOG, EVAL_LOG = "log.jsonl", "eval.jsonl"
RUN_FILES = ("run.json", "checkpoint-*", "*.ckpt", "*.safetensors")
"""Files that a run of any recipe leaves in its folder."""
NOT_SAVED = {"resume", "output", "config"}
CHANGEABLE = NOT_SAVED | {
    "workers", "devices", "accelerator", "strategy", "checkpointing", "save_every", "eval_every",
    "prompt", "log_every", "log_with", "keep", "sequence_parallel",
}  # fmt: skip
"""Settings that may change on a resume: none of them changes the order of the data."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Set by launchers; the main process has 0 or nothing in all of them."""


def is_main_process() -> bool:
    """Return whether this is the main process of the run, before any library knows its rank."""
    return all(os.environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def find_run(recipe: str, name: str, output: Path | None) -> Path:
    """Return the folder of the run to resume.

    name: a folder, or "last" for `output` or, without it, the run with the highest number.
    """
    path = Path(name).expanduser() if name != "last" else output or _numbered(recipe, 0)
    if output and path.resolve() != output.resolve():
        raise ValueError(
            f"--resume {path} and --output {output} differ: a run continues in its own folder"
        )
    if not (path / "run.json").is_file():
        raise ValueError(f"no run to resume in {path.absolute()}: pass the folder of its run.json")
    started = read_settings(path)["recipe"]
    if started != recipe:
        raise ValueError(f"{path} is a run of {started}.py: resume it with that recipe")
    return path


def new_path(recipe: str, output: Path | None) -> Path:
    """Return `output`, or the next unused number; raise if the folder contains a run."""
    path = output or _numbered(recipe, 1)
    if any(file for pattern in RUN_FILES for file in path.glob(pattern)):
        raise ValueError(
            f"{path} contains a run already: continue it with --resume {path}, "
            "choose another --output, or remove it"
        )
    return path


def _numbered(recipe: str, offset: int) -> Path:
    """Return the folder with the highest number, or one further."""
    names = (re.fullmatch(rf"{recipe}-(\d+)", path.name) for path in RUNS_DIR.glob("*"))
    return RUNS_DIR / f"{recipe}-{max([0, *(int(name[1]) for name in names if name)]) + offset}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a run was started with."""
    try:
        settings = json.loads((path / "run.json").read_text())
        return {**settings, "recipe": settings["recipe"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / 'run.json'} is damaged: {error}") from None


def check_unchanged(path: Path, settings: dict[str, Any], explicit: dict[str, Any]) -> None:
    """Raise if an explicit argument would change what a resumed run computes."""
    for name, value in explicit.items():
        # By repr, because 0 == False: --add-eos 0 is a token id, --add-eos none is False.
        if name not in CHANGEABLE and repr(settings[name]) != repr(value):
            option = "MODEL" if name == "model" else "--" + name.replace("_", "-")
            before = f"no {option}" if settings[name] is None else f"{option} {settings[name]}"
            raise ValueError(f"{path} was started with {before} (now {value}): omit {option}")


class RunDir:
    """The folder of one run, in which one process trains at a time."""

    def __init__(self, recipe: str, args: argparse.Namespace):
        """Choose the folder, of a new run or of the resumed one, and set `args.output` to it.

        A run that was killed before its first checkpoint starts over: `args.resume` becomes None.
        """
        self.recipe, self.training_started, self.can_resume = recipe, False, True
        self.settings = {k: v for k, v in vars(args).items() if k not in NOT_SAVED}
        self.exists = args.resume is not None
        self.path = args.output = args.output if self.exists else new_path(recipe, args.output)
        if self.exists and is_main_process():
            self._lock_folder()
        self.starts_over = self.exists and not self._has_checkpoint()
        if self.starts_over:
            args.resume = None

    def _lock_folder(self) -> None:
        from nopad.trainer import lock_folder  # imported late: loads torch

        self._lock = lock_folder(self.path)

    def _has_checkpoint(self) -> bool:
        """Whether the run has completed any save, even if it has been damaged since."""
        from nopad.trainer import find_manifest

        saved = [path for path in self.path.iterdir() if path.suffix in (".ckpt", ".safetensors")]
        return bool(saved) or any(map(find_manifest, self.path.glob("checkpoint-*")))

    def start(self, is_main_process: bool) -> None:
        """Create the folder at the first step, when all ranks have chosen it; call it on each."""
        if is_main_process and not self.training_started:
            if self.starts_over:
                tqdm.write(f"{self.path} has no checkpoint yet: starting again at step 0")
                self.truncate_logs(-1)
            if not self.exists:
                self._create()
            if self.can_resume:
                tqdm.write(f"after a stop, continue with: {self.resume_command()}")
        self.training_started = True

    def _create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        try:
            with (self.path / "run.json").open("x") as file:  # of two processes, one succeeds
                json.dump({"recipe": self.recipe, **self.settings}, file, indent=2)
        except FileExistsError:
            raise ValueError(
                f"another run has taken {self.path} in the meantime: start again, or set --output"
            ) from None

    def resume_command(self) -> str:
        """Return the command that continues this run, as a shell reads it."""
        script = sys.argv[0]
        is_copy = script.endswith(".py") and Path(script).name != "__main__.py"
        command = f"nopad {self.recipe.replace('_', '-')}"
        command = f"python {shlex.quote(script)}" if is_copy else command
        launched = " (launched as before)" if "LOCAL_WORLD_SIZE" in os.environ else ""
        return f"{command} --resume {shlex.quote(str(self.path))}{launched}"

    def print_end(self, what: str, finished: bool) -> None:
        """Print that the run is done, or how to continue it."""
        more = f"; continue with: {self.resume_command()}" if self.can_resume else ""
        tqdm.write(f"done: {what}" if finished else f"stopped: {what}{more}")

    def log(self, step: int, values: dict[str, Any], name: str = TRAIN_LOG) -> None:
        """Append a line to a log."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def read_log(self, name: str = TRAIN_LOG) -> list[dict[str, Any]]:
        """Return the lines of a log; none if nothing was logged."""
        path = self.path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def truncate_logs(self, step: int) -> None:
        """Remove log lines after `step`, which a resumed run repeats, and incomplete lines."""
        for path in (self.path / TRAIN_LOG, self.path / EVAL_LOG):
            if path.exists():
                lines = path.read_text(errors="replace").splitlines(keepends=True)
                unfinished = path.with_suffix(".unfinished")
                unfinished.write_text("".join(n for n in lines if _logged_step(n) <= step))
                unfinished.replace(path)


def _logged_step(line: str) -> float:
    """Return the step of a log line; infinity for a line that a kill truncated."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
