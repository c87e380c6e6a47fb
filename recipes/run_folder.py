"""The folder of a run: numbered checkpoints that appear whole or not at all.

runs/pretrain-1/run.json            what the run was started with
runs/pretrain-1/log.jsonl           loss, one line a step; rates every tenth
runs/pretrain-1/checkpoint-50/      weights, optimizer, schedule, RNG, data position, tokenizer

A checkpoint is sealed and then renamed to its name; a torn or damaged one is passed over.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

RUNS = Path("runs")


class RunFolder:
    """Choose, check and fill the folder of one run."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.settings = settings

    @classmethod
    def new(cls, name: str, output: Path | None, settings: dict) -> RunFolder:
        """Take `output`, or the next free number; never a folder that holds a run already."""
        path = output or RUNS / f"{name}-{max([0, *_numbers(RUNS, name)]) + 1}"
        if (path / "run.json").exists():
            raise ValueError(
                f"{path} holds a run already: continue it with --resume {path}, "
                "or choose another --output"
            )
        return cls(path, settings)

    @classmethod
    def resumed(cls, name: str, which: str, settings: dict) -> RunFolder:
        """Open the named run, or the last one, if it was started with the same settings."""
        path = Path(which)
        if which == "last":
            numbers = _numbers(RUNS, name)
            if not numbers:
                raise ValueError(f"no run to resume under {RUNS}/: start one without --resume")
            path = RUNS / f"{name}-{max(numbers)}"
        if not (path / "run.json").is_file():
            raise ValueError(f"{path} is no run folder (it has no run.json): name one of {RUNS}/")
        before = json.loads((path / "run.json").read_text())
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed:
            was = ", ".join(f"{k}={before.get(k)!r} (now {settings[k]!r})" for k in changed)
            raise ValueError(f"{path} was started with {was}: pass the same, or start a new run")
        return cls(path, settings)

    def start(self) -> None:
        """Create the folder and write down what the run is; of a resumed one that is known."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "run.json").exists():
            _write(self.path / "run.json", json.dumps(self.settings, indent=2) + "\n")

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def last_step(self) -> int:
        """The step of the newest whole checkpoint."""
        from nopad.trainer.seal import last_whole_checkpoint

        return int(last_whole_checkpoint(self.path).name.partition("-")[2])

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written until it is whole."""
        return self.path / f"unfinished-{step}"

    def begin(self, step: int) -> None:
        """Clear away what a save that was cut short has left."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def finish(self, step: int) -> None:
        """Seal the checkpoint, and let it appear under its name, in one rename."""
        from nopad.trainer.seal import seal

        seal(self.unfinished(step))
        shutil.rmtree(self.checkpoint(step), ignore_errors=True)
        self.unfinished(step).rename(self.checkpoint(step))

    def log(self, step: int, values: dict) -> None:
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop log lines of steps that a resumed run will take again, and torn ones."""
        path = self.path / "log.jsonl"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
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


def _numbers(folder: Path, name: str) -> list[int]:
    matches = (re.fullmatch(rf"{name}-(\d+)", path.name) for path in folder.glob(f"{name}-*"))
    return [int(match[1]) for match in matches if match]
