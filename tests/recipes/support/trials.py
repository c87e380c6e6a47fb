"""Run recipes under signals, crashes during a save, killed workers and changed data.

    python tests/recipes/support/trials.py --folder /tmp/trials signals:pretrain:200
    python tests/recipes/support/trials.py --folder /tmp/trials crashes:train_hf:14

A trial is named KIND:RECIPE:COUNT[:FIRST]. Every run must end with the documented status and, when
resumed, reach the weights of an uninterrupted run. The random choices are seeded with the trial's
number, so a trial can be repeated: FIRST is the first number. The last line is JSON: the number of
trials, their outcomes, and the failures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "trainer" / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate.accelerator  # noqa: E402
import lightning.pytorch  # noqa: E402, F401
import psutil  # noqa: E402
import small_inputs  # noqa: E402
import torch  # noqa: E402
from forking import Ranks, compile_once, fresh  # noqa: E402
from nopad.inference import (  # noqa: E402
    DataParallelEngine,  # noqa: F401
    Engine,  # noqa: F401
)
from nopad.packing.state import state_file  # noqa: E402
from nopad.recipes import pretrain, pretrain_lightning, train_hf  # noqa: E402
from nopad.recipes.support.run_recipe import run_recipe  # noqa: E402
from nopad.trainer import checkpoint_manifest, graceful_stop  # noqa: E402
from nopad.trainer.data import data_state, loader  # noqa: E402
from nopad.trainer.evaluation import GenerationEval  # noqa: E402
from nopad.trainer.with_accelerate import checkpoint as with_accelerate_checkpoint  # noqa: E402
from nopad.trainer.with_accelerate import loader as with_accelerate  # noqa: E402
from nopad.trainer.with_hf import intact_checkpoints as hf_checkpoints  # noqa: E402
from nopad.trainer.with_hf import trainer as with_hf  # noqa: E402
from nopad.trainer.with_lightning import packed_callback as with_lightning  # noqa: E402
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402, F401

STEPS = 12
RECIPES = {"pretrain": pretrain, "train_hf": train_hf, "pretrain_lightning": pretrain_lightning}
EXTRA_ARGS = {
    "pretrain": ["--eval-every", "5", "--prompt", "w1 w2", "--warmup", "2"],
    "train_hf": ["--warmup", "2", "--learning-rate", "1e-3"],
    "pretrain_lightning": ["--warmup", "2", "--accelerator", "cpu", "--strategy", "ddp"],
}


class RecipeRun:
    """One recipe on the smallest inputs, and the weights that it must reach."""

    def __init__(self, name: str, folder: Path, workers: int = 0):
        self.name, self.folder, self.workers = name, folder, workers
        inputs = fresh(folder / "inputs")
        self.common = ["--data", small_inputs.documents(inputs), "--budget", "128",
                       small_inputs.model(inputs), "--steps", STEPS,
                       "--tokenizer", small_inputs.tokenizer(inputs), "--save-every", "4",
                       "--workers", workers, *EXTRA_ARGS[name]]  # fmt: skip
        self.reference_digests: dict[int, str] = {}

    def start(
        self, folder: Path, world_size: int, resume: bool = False, prepare: Callable | None = None
    ) -> Ranks:
        """Start the ranks; prepare: called in each rank's process, with the rank, before main."""
        argv = [*map(str, self.common), *self._output_args(resume), *self._device_args(world_size)]

        def target(rank: int) -> int:
            torch.set_num_threads(1)
            if prepare is not None:
                prepare(rank)
            recipe = RECIPES[self.name]
            return run_recipe(self.name, recipe.parse_args, recipe.train, argv)

        return Ranks(target, folder, world_size)

    def _device_args(self, world_size: int) -> list[str]:
        return ["--devices", str(world_size)] if self.name == "pretrain_lightning" else []

    def _output_args(self, resume: bool) -> list[str]:
        if self.name == "pretrain":
            return ["--resume", "out"] if resume else ["--output", "out"]
        return ["--output", "out", *(["--resume"] if resume else [])]

    def reference_digest(self, world_size: int) -> str:
        """Hash the weights of an uninterrupted run."""
        if world_size not in self.reference_digests:
            folder = fresh(self.folder / f"whole-{world_size}")
            start = time.monotonic()
            run = self.start(folder, world_size)
            assert run.wait() == [0] * world_size, f"{run.codes}\n{run.said()}"
            self.seconds = time.monotonic() - start
            self.reference_digests[world_size] = self.weights_digest(folder)
        return self.reference_digests[world_size]

    def weights_digest(self, folder: Path) -> str:
        if self.name == "pretrain_lightning":
            weights = torch.load(folder / "out" / "last.ckpt", weights_only=True)["state_dict"]
            flat = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
            return hashlib.sha256(flat).hexdigest()
        last = f"checkpoint-{STEPS}/model.safetensors" if self.name == "pretrain" else "."
        path = folder / "out" / last
        path = path if path.is_file() else folder / "out" / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def check_checkpoints(self, folder: Path) -> None:
        """Assert that every checkpoint under its final name is intact."""
        if self.name == "pretrain_lightning":
            return checkpoint_manifest.check_archive(folder / "out" / "last.ckpt")
        for path in (folder / "out").glob("checkpoint-*"):
            assert checkpoint_manifest.find_damage(path) is None, (
                f"{path.name}: {checkpoint_manifest.find_damage(path)}"
            )

    def check_resume(self, folder: Path, world_size: int) -> None:
        """Resume, or start over if nothing was saved, and compare with the uninterrupted run."""
        checkpoints = (folder / "out").glob("checkpoint-*")
        saved = any(checkpoint_manifest.find_damage(path) is None for path in checkpoints)
        saved = saved or (folder / "out" / "last.ckpt").exists()
        if not saved:
            fresh(folder)
        run = self.start(folder, world_size, resume=saved)
        assert run.wait() == [0] * world_size, run.said()
        assert self.weights_digest(folder) == self.reference_digest(world_size), (
            "the weights differ from those of an uninterrupted run"
        )


SIGNAL_POINTS = {
    "first step": (loader.PackedLoader, "_issue", 0),
    "evaluation": (GenerationEval, "_evaluate", 0),
    "save": (data_state, "gather_data_state", 1),
    "end": (graceful_stop.StopRequest, "release", 0),
}
"""Where a signal arrives: the owner of a function, its name, and how many calls to skip.

"end" comes after the function: the training has released the signals.
"""


def signal_on_call(owner: object, name: str, skip: int, number: int) -> None:
    """Send a signal to this process when it calls the function, after `skip` calls."""
    original, calls = getattr(owner, name), [0]

    def wrapper(*args, **kwargs):
        calls[0] += 1
        if calls[0] == skip + 1:
            if owner is graceful_stop.StopRequest:
                original(*args, **kwargs)
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def signals(recipe: RecipeRun, number: int) -> str:
    """A signal on one rank stops all ranks with an intact checkpoint; a second exits at once."""
    rng = random.Random(number)
    world_size, signal_number = rng.choice([1, 2]), rng.choice(graceful_stop.STOP_SIGNALS)
    point = rng.choice([*SIGNAL_POINTS, "random", "random", "random", "twice"])
    target_rank = rng.randrange(world_size)
    if point == ("end" if recipe.name == "pretrain" else "evaluation"):
        point = "random"
    recipe.reference_digest(world_size)
    folder = fresh(recipe.folder / f"signals-{number}")

    def prepare(rank: int) -> None:
        original = graceful_stop.StopRequest.listen

        def listen(self) -> None:
            original(self)
            Path(f"listening-{rank}").touch()

        graceful_stop.StopRequest.listen = listen
        if rank == target_rank and point in SIGNAL_POINTS:
            signal_on_call(*SIGNAL_POINTS[point], signal_number)

    run = recipe.start(folder, world_size, prepare=prepare)
    ready = [folder / f"listening-{rank}" for rank in range(world_size)]
    run.wait_for(lambda: all(path.exists() for path in ready))
    sent = time.monotonic()
    if point in ("random", "twice"):
        time.sleep(rng.uniform(0, recipe.seconds))
        sent = time.monotonic()
        for _ in range(2 if point == "twice" else 1):
            for rank in range(world_size) if point == "twice" else (target_rank,):
                run.send(signal_number, rank)
            time.sleep(2 * graceful_stop.RELAY_SECONDS)
    codes = run.wait()
    seconds = time.monotonic() - sent
    outcome = "second" if point == "twice" and any(codes) else point
    if outcome == "second":
        for rank, code in enumerate(codes):  # a rank whose peer has exited ends with an error
            lost_peer = code == 1 and re.search("(closed|reset) by peer", run.said(rank))
            assert lost_peer or code in (0, 128 + signal_number), f"{codes}\n{run.said(rank)}"
    else:
        assert codes == [0] * world_size, f"{codes}\n{run.said()}"
        recipe.check_checkpoints(folder)
        assert "done" in run.said() or "stopped" in run.said()
    if "done: " not in run.said():
        recipe.check_resume(folder, world_size)
    return f"{outcome} {seconds if point in ('random', 'twice') else 0:.1f}"


CRASH_POINTS = {
    "before the save": ((with_accelerate, with_hf), "save_data_state", 1),
    "state gathered, not written": ((data_state,), "write_state", 1),
    "state written": ((data_state,), "barrier", 1),
    "all written, no manifest": (
        (with_accelerate_checkpoint, hf_checkpoints),
        "write_manifest",
        1,
    ),
    "some written": ((with_hf.PackedTrainer,), "_save_optimizer_and_scheduler", 1),
    "gathered, not written": ((accelerate.accelerator,), "save_accelerator_state", 1),
    "after the save": ((graceful_stop.StopRequest,), "should_stop", 8),
}
"""Where a save is interrupted: owners of a function, its name, and how many calls to skip."""


def crashes(recipe: RecipeRun, number: int) -> str:
    """kill -9 during a save; the remaining files resume to the same weights."""
    world_size = 1 + number // len(CRASH_POINTS) % 2
    point = list(CRASH_POINTS)[number % len(CRASH_POINTS)]
    owners, name, skip = CRASH_POINTS[point]
    recipe.reference_digest(world_size)
    folder = fresh(recipe.folder / f"crashes-{number}")

    def prepare(rank: int) -> None:
        for owner in owners if rank == 0 else ():
            if hasattr(owner, name):
                signal_on_call(owner, name, skip, signal.SIGKILL)

    run = recipe.start(folder, world_size, prepare=prepare)
    run.wait_for(lambda: os.waitid(os.P_PID, run.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                 is not None)  # fmt: skip
    run.kill()  # as a launcher does with the other ranks
    assert run.codes[0] in (-9, 0), run.said()
    crashed = run.codes[0] == -9
    recipe.check_resume(folder, world_size) if crashed else recipe.check_checkpoints(folder)
    return point if crashed else "nothing to crash"


def killed(recipe: RecipeRun, number: int) -> str:
    """kill -9 of the main process, of a data worker or of the group leaves no orphans."""
    rng = random.Random(number)
    target = rng.choice(["main", "worker", "group"])
    recipe.reference_digest(1)
    folder = fresh(recipe.folder / f"killed-{number}")
    run = recipe.start(folder, 1)
    main = psutil.Process(run.pids[0])
    run.wait_for(lambda: not main.is_running() or bool(main.children()) or "done" in run.said())
    time.sleep(rng.uniform(0, 0.5 * recipe.seconds))
    try:
        children = main.children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if target == "group":
        os.killpg(run.pids[0], signal.SIGKILL)
    elif target == "worker" and children:
        rng.choice(children).kill()
    else:
        run.send(signal.SIGKILL, 0)
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"orphans: {alive}"
    if run.codes[0] == 1:
        assert "data worker died" in run.said(), run.said()
    recipe.check_resume(folder, 1) if "done: " not in run.said() else None
    return f"{target} {run.codes[0]}"


CHANGES = ("fingerprint", "tokenizer", "budget", "seed", "version")


def changed(recipe: RecipeRun, number: int) -> str:
    """A resume with other data, tokenizer, budget, seed or packer version is refused by name."""
    change = CHANGES[number % len(CHANGES)]
    folder = fresh(recipe.folder / f"changed-{number}")
    copy = RecipeRun(recipe.name, folder)
    assert copy.start(folder, 1).wait() == [0]
    if change in ("budget", "seed"):
        copy.common += [f"--{change}", "64"]
    elif change == "version":
        _change_version(folder / "out")
    else:
        name = "ids.jsonl" if change == "fingerprint" else "tokenizer/tokenizer.json"
        path = folder / "inputs" / name
        path.write_text(path.read_text().replace("7", "8", 1) if change == "fingerprint"
                        else path.read_text().replace("w99", "w999", 1))  # fmt: skip
    run = copy.start(folder, 1, resume=True)
    assert run.wait() == [2] and change in run.said().splitlines()[-1], run.said()
    return change


def _change_version(out: Path) -> None:
    if (out / "last.ckpt").exists():
        checkpoint = torch.load(out / "last.ckpt", weights_only=True)
        checkpoint[with_lightning.DATA_KEY]["version"] = 99
        return torch.save(checkpoint, out / "last.ckpt")
    for folder in out.glob("checkpoint-*"):
        path = folder / data_state.STATE_FILE
        state_file.write_state(path, {**state_file.read_state(path), "version": 99})
        checkpoint_manifest.write_manifest(folder)
    return None


def _check_points() -> None:
    """Assert that every patched function exists: a renamed one would never be called."""
    points = [((owner,), name) for owner, name, _ in SIGNAL_POINTS.values()]
    points += [(owners, name) for owners, name, _ in CRASH_POINTS.values()]
    for owners, name in points:
        assert any(hasattr(owner, name) for owner in owners), f"no function is called {name}"


TRIALS = {"signals": signals, "crashes": crashes, "killed": killed, "changed": changed}


def run_trials(recipe: RecipeRun, kind: str, numbers: range) -> dict:
    """Run the trials with these numbers; return their outcomes and failures."""
    outcomes, failures = {}, []
    for number in numbers:
        try:
            result = TRIALS[kind](recipe, number)
            outcome = result.rpartition(" ")[0] if kind == "signals" else result
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        except AssertionError as error:
            result = f"FAILED {str(error)[-20000:]}"
            failures.append([number, result])
        print(kind, recipe.name, number, result, flush=True)
    return {"trials": len(numbers), "outcomes": outcomes, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", nargs="+", metavar="KIND:RECIPE:COUNT[:FIRST]")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    _check_points()
    compile_once()
    results = {}
    for spec in args.trials:
        kind, name, count, first = [*spec.split(":"), "0"][:4]
        recipe = RecipeRun(name, args.folder / f"{kind}-{name}", workers=int(kind == "killed"))
        results[spec] = run_trials(recipe, kind, range(int(first), int(first) + int(count)))
    print(json.dumps(results))
    return int(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
