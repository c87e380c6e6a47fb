"""The folder of a run; its checkpoints appear under their names only when complete.

runs/pretrain-1/run.json            the settings that the run was started with
runs/pretrain-1/run.lock            locked while a process trains in the folder
runs/pretrain-1/log.jsonl           loss and tokens of every step; rates of the first and tenth ones
runs/pretrain-1/eval.jsonl          the metrics of every evaluation
runs/pretrain-1/training.svg        a plot of them, written at the end
runs/pretrain-1/checkpoint-50/      weights, optimizer, schedule, RNG, data position, tokenizer

A checkpoint is written as unfinished-N, gets its manifest last, and is then renamed. Incomplete
and damaged checkpoints are skipped by a resume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nopad.recipes.support.run_lock import is_main_process, lock_run

RUNS_DIR = Path("runs")
TRAIN_LOG, EVAL_LOG = "log.jsonl", "eval.jsonl"
RUN_FILES = ("run.json", "checkpoint-*", "*.ckpt", "*.safetensors")
"""Files that a run of any recipe leaves in its folder."""
NOT_SAVED = {"resume", "output", "config"}
CHANGEABLE = NOT_SAVED | {
    "workers", "devices", "accelerator", "strategy", "checkpointing", "save_every", "eval_every",
    "prompt", "log_every", "log_with", "keep", "continue_on_nan",
    "sequence_parallel",
}  # fmt: skip
"""Settings that may change on a resume.

None of them changes the order of the data; `devices` and `sequence_parallel` change how much of it
a step trains on.
"""


def add_run_options(add: Any, recipe: str) -> None:
    """Add the options that place a run and resume it."""
    add("--output", type=folder,
        help=f"folder of the run; default: the next unused runs/{recipe}-N")  # fmt: skip
    add("--resume", nargs="?", const="last", metavar="FOLDER",
        help="continue the run in this folder, with the settings it was started with; without "
        f"FOLDER: the run in --output, or the last of runs/{recipe}-N")  # fmt: skip
    add("--continue-on-nan", action="store_true",
        help="train on after a loss that is not finite; weights that are not finite are never "
        "saved")  # fmt: skip


def folder(text: str) -> Path:
    """Return the path of a folder, which need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: pass a folder, or omit it")
    path = Path(os.path.expanduser(text))
    above = next(each for each in (path, *path.parents) if each.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {above} is a file, not a folder")
    return path


def find_run(recipe: str, name: str, output: Path | None) -> Path:
    """Return the folder of the run to resume.

    name: a folder, or "last" for `output`, if given, or else the run with the highest number.
    """
    if not name:
        raise ValueError(
            "--resume '' names no folder: pass one, or --resume alone for the last run"
        )
    path = Path(os.path.expanduser(name)) if name != "last" else output
    if path and output and path.resolve() != output.resolve():
        raise ValueError(
            f"--resume {path} and --output {output} differ: a run continues in its own folder"
        )
    if path is None:
        numbers = _numbers(RUNS_DIR, recipe)
        if not numbers:
            raise ValueError(
                f"no run to resume: {RUNS_DIR.absolute()} has no folder {recipe}-N; for a run that "
                "was started with --output FOLDER, pass --resume FOLDER"
            )
        path = RUNS_DIR / f"{recipe}-{max(numbers)}"
    if not (path / "run.json").is_file():
        raise ValueError(_not_a_run(path))
    of = read_settings(path).get("recipe", recipe)
    if of != recipe:
        raise ValueError(f"{path} is a run of {of}.py: resume it with that, or start a new run")
    return path


def _not_a_run(path: Path) -> str:
    """Say that a folder has no run, and which one near it has."""
    reason = "has no run.json" if path.is_dir() else "does not exist"
    near = [path.parent] if (path.parent / "run.json").is_file() else []
    near = near or sorted(file.parent for file in path.glob("*/run.json"))
    near = near or sorted(file.parent for file in RUNS_DIR.glob("*/run.json"))
    way_out = " or ".join(f"--resume {shlex.quote(str(each))}" for each in near[-3:])
    way_out = f"pass {way_out}" if near else "pass the folder that the run was started with"
    return f"{path.absolute()} is not a run folder (it {reason}): {way_out}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a run was started with."""
    try:
        settings = json.loads((path / "run.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path / 'run.json'} is damaged: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path / 'run.json'} is damaged: it contains no settings")
    return settings


def check_unchanged(path: Path, settings: dict[str, Any], explicit: dict[str, Any]) -> None:
    """Raise if an explicit argument would change what a resumed run computes."""
    changes = []
    for name in [name for name in explicit if name not in CHANGEABLE]:
        # By repr, because 0 == False: --add-eos 0 is a token id, --add-eos none is False.
        if repr(settings[name]) == repr(explicit[name]):
            continue
        option = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        before = f"no {option}" if settings[name] is None else f"{option} {settings[name]}"
        changes.append(f"{before} (now {explicit[name]})")
    if changes:
        raise ValueError(
            f"{path} was started with {', '.join(changes)}: omit that, or start a new run"
        )


@dataclass
class RunProgress:
    """How far a run has come: an error before its first step is one that the user can fix."""

    training_started: bool = False


class RunDir:
    """Create the folder of one run, and write its log and checkpoints.

    settings: what run.json records.
    created: whether run.json has been written already.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        progress: RunProgress | None = None,
        created: bool = False,
    ):
        self.path, self.settings, self.created = path, settings, created
        self.progress = progress or RunProgress()
        self.restarts_at_zero = False
        self.can_resume = True
        self._lock: IO[str] | None = None

    @classmethod
    def from_args(
        cls, recipe: str, args: argparse.Namespace, progress: RunProgress | None = None
    ) -> RunDir:
        """Choose the folder, of a new run or of the resumed one, and set `args.output` to it.

        A run that was killed before its first checkpoint starts over: `args.resume` becomes None.
        """
        settings = {k: v for k, v in vars(args).items() if k not in NOT_SAVED}
        settings["recipe"] = recipe
        path = args.output if args.resume else new_path(recipe, args.output)
        run_dir = cls(path, settings, progress, created=bool(args.resume))
        args.output = path
        if args.resume and is_main_process():
            run_dir.lock()
        if args.resume and not run_dir.has_checkpoint():
            args.resume, run_dir.restarts_at_zero = None, True
        return run_dir

    def lock(self) -> None:
        """Lock the folder, unless that is done; raise if another process trains in it."""
        if self._lock is None:
            self._lock = lock_run(self.path)

    def start_training(self, is_main_process: bool) -> None:
        """Record, on every rank, that the first step starts; the main process writes run.json."""
        if is_main_process:
            self.create()
        if is_main_process and self.can_resume and not self.progress.training_started:
            from tqdm import tqdm

            tqdm.write(f"after a stop, continue with: {self.resume_command()}")
        self.progress.training_started = True

    def create(self) -> None:
        """Create the folder and write run.json, unless that is done.

        Called on one rank, when all ranks have chosen their path: otherwise a rank could find the
        folder taken by its own run.
        """
        if self.restarts_at_zero:
            from tqdm import tqdm

            tqdm.write(f"{self.path} has no checkpoint yet: starting again at step 0")
            self.truncate_log(-1)
            self.restarts_at_zero = False
        if self.created:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        try:
            with (self.path / "run.json").open("x") as file:  # of two processes, one succeeds
                file.write(json.dumps(self.settings, indent=2) + "\n")
        except FileExistsError:
            raise ValueError(
                f"another run has taken {self.path} in the meantime: start again, or set --output"
            ) from None
        self.created = True

    def resume_command(self) -> str:
        """Return the command that continues this run, as a shell reads it.

        >>> RunDir(Path("my runs/a"), {"recipe": "train_hf"}).resume_command()
        "nopad train-hf --resume 'my runs/a'"
        """
        script = sys.argv[0]
        is_copy = script.endswith(".py") and Path(script).name != "__main__.py"
        command = f"nopad {self.settings['recipe'].replace('_', '-')}"
        command = f"python {shlex.quote(script)}" if is_copy else command
        launched = " (launched as before)" if "LOCAL_WORLD_SIZE" in os.environ else ""
        return f"{command} --resume {shlex.quote(str(self.path))}{launched}"

    def stop_line(self, what: str) -> str:
        """Return what a run that was stopped prints at its end."""
        more = f"; continue with: {self.resume_command()}" if self.can_resume else ""
        return f"stopped: {what}{more}"

    def checkpoint_path(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def has_checkpoint(self) -> bool:
        """Whether the run has completed any save, even if it has been damaged since."""
        from nopad.trainer import find_manifest

        if any(find_manifest(path) for path in self.path.glob("checkpoint-*")):
            return True
        return any(
            path for suffix in ("ckpt", "safetensors") for path in self.path.glob(f"*.{suffix}")
        )

    def latest_step(self) -> int:
        """Return the step of the newest intact checkpoint."""
        from nopad.trainer import latest_intact_checkpoint

        return int(latest_intact_checkpoint(self.path).name.partition("-")[2])

    def unfinished_path(self, step: int) -> Path:
        """Return where a checkpoint is written until it is complete."""
        return self.path / f"unfinished-{step}"

    def remove_unfinished(self) -> None:
        """Remove the remains of interrupted saves."""
        for path in self.path.glob("unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)

    def commit_checkpoint(self, step: int, keep: int | None = None) -> None:
        """Write the manifest, and rename the checkpoint to its final name.

        keep: how many checkpoints to keep up to this one; None keeps all. Later ones are then
        removed too: they are damaged, or the run would have been resumed from them.
        """
        from nopad.trainer import write_manifest

        write_manifest(self.unfinished_path(step))
        shutil.rmtree(self.checkpoint_path(step), ignore_errors=True)
        self.unfinished_path(step).rename(self.checkpoint_path(step))
        steps = sorted(_numbers(self.path, "checkpoint"))
        end = steps.index(step) + 1
        for old in steps[: max(0, end - keep)] + steps[end:] if keep else ():
            # Renamed first: a kill during the removal must not leave half a checkpoint.
            self.checkpoint_path(old).rename(self.unfinished_path(old))
            shutil.rmtree(self.unfinished_path(old), ignore_errors=True)

    def log(self, step: int, values: dict[str, Any], name: str = TRAIN_LOG) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def read_log(self, name: str = TRAIN_LOG) -> list[dict[str, Any]]:
        """Return the lines of a log; none if nothing was logged."""
        path = self.path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def truncate_log(self, step: int) -> None:
        """Remove log lines after `step`, which a resumed run repeats, and incomplete lines."""
        for path in (self.path / TRAIN_LOG, self.path / EVAL_LOG):
            if path.exists():
                lines = path.read_text(errors="replace").splitlines(keepends=True)
                kept = "".join(line for line in lines if _logged_step(line) <= step)
                _write_atomically(path, kept)


def new_path(recipe: str, output: Path | None) -> Path:
    """Return `output`, or the next unused number; raise if the folder contains a run."""
    path = output or RUNS_DIR / f"{recipe}-{max([0, *_numbers(RUNS_DIR, recipe)]) + 1}"
    if any(file for pattern in RUN_FILES for file in path.glob(pattern)):
        raise ValueError(
            f"{path} contains a run already: continue it with --resume {path}, "
            "choose another --output, or remove it"
        )
    return path


def _logged_step(line: str) -> float:
    """Return the step of a log line; infinity for a line that a kill truncated."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


def _write_atomically(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _numbers(folder: Path, prefix: str) -> list[int]:
    """Return N of every `prefix-N` in a folder."""
    matches = (re.fullmatch(rf"{prefix}-(\d+)", path.name) for path in folder.glob(f"{prefix}-*"))
    return [int(match[1]) for match in matches if match]
