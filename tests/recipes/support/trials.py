"""Trials of whole recipes: signals, crashes in a save, killed workers, other data on resume.

    python tests/recipes/support/trials.py --folder /tmp/trials signals:pretrain:200 crashes:train_hf:14
    python tests/recipes/support/trials.py --folder /tmp/trials killed:pretrain:200 changed:train_hf:5

Every trial must end as promised and, resumed, arrive at the weights of an uninterrupted run. The
random choices come from the trial's number, so that a trial can be had again: the fourth part of a
name is the first number. The last line is JSON: how many trials, how they went, which failed.
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
from nopad.packing.state import atomic_file  # noqa: E402
from nopad.recipes import pretrain, pretrain_lightning, train_hf  # noqa: E402
from nopad.recipes.support.arguments import run_recipe  # noqa: E402
from nopad.trainer import checkpoint_manifest, graceful_stop  # noqa: E402
from nopad.trainer.data import data_state, loader  # noqa: E402
from nopad.trainer.evaluation import GenerationEval  # noqa: E402
from nopad.trainer.with_accelerate import loader as with_accelerate  # noqa: E402
from nopad.trainer.with_hf import trainer as with_hf  # noqa: E402
from nopad.trainer.with_lightning import packs as with_lightning  # noqa: E402
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402, F401

STEPS = 12
MAIN = {"pretrain": pretrain, "train_hf": train_hf, "pretrain_lightning": pretrain_lightning}
MORE = {
    "pretrain": ["--eval-every", "5", "--prompt", "w1 w2", "--warmup", "2"],
    "train_hf": ["--warmup", "2", "--learning-rate", "1e-3"],
    "pretrain_lightning": ["--warmup", "2", "--accelerator", "cpu", "--strategy", "ddp"],
}


class Recipe:
    """One recipe on the smallest inputs, with what it must arrive at."""

    def __init__(self, name: str, folder: Path, workers: int = 0):
        self.name, self.folder, self.workers = name, folder, workers
        inputs = fresh(folder / "inputs")
        self.common = ["--data", small_inputs.documents(inputs), "--budget", "128",
                       "--model", small_inputs.model(inputs), "--steps", STEPS,
                       "--tokenizer", small_inputs.tokenizer(inputs), "--save-every", "4",
                       "--workers", workers, *MORE[name]]  # fmt: skip
        self.wanted: dict[int, str] = {}

    def start(self, at: Path, world: int, resume: bool = False, prepare: Callable | None = None):
        arguments = [*map(str, self.common), *self._where(resume), *self._devices(world)]

        def target(rank: int) -> int:
            torch.set_num_threads(1)
            if prepare is not None:
                prepare(rank)
            return run_recipe(self.name, MAIN[self.name].main, arguments)

        return Ranks(target, at, world)

    def _devices(self, world: int) -> list[str]:
        return ["--devices", str(world)] if self.name == "pretrain_lightning" else []

    def _where(self, resume: bool) -> list[str]:
        if self.name == "pretrain":
            return ["--resume", "out"] if resume else ["--output", "out"]
        return ["--output", "out", *(["--resume"] if resume else [])]

    def reference(self, world: int) -> str:
        """The digest of an uninterrupted run's weights."""
        if world not in self.wanted:
            at = fresh(self.folder / f"whole-{world}")
            began = time.monotonic()
            assert self.start(at, world).wait(90) == [0] * world
            self.seconds = time.monotonic() - began
            self.wanted[world] = self.digest(at)
        return self.wanted[world]

    def digest(self, at: Path) -> str:
        if self.name == "pretrain_lightning":
            weights = torch.load(at / "out" / "last.ckpt", weights_only=True)["state_dict"]
            flat = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
            return hashlib.sha256(flat).hexdigest()
        last = f"checkpoint-{STEPS}/model.safetensors" if self.name == "pretrain" else "."
        path = at / "out" / last
        path = path if path.is_file() else at / "out" / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def check_whole(self, at: Path) -> None:
        """Every checkpoint that goes by its name is whole."""
        if self.name == "pretrain_lightning":
            return checkpoint_manifest.check_archive(at / "out" / "last.ckpt")
        for path in (at / "out").glob("checkpoint-*"):
            assert checkpoint_manifest.find_damage(path) is None, (
                f"{path.name}: {checkpoint_manifest.find_damage(path)}"
            )

    def go_on(self, at: Path, world: int) -> None:
        """Resume, or start anew where nothing was saved, and arrive where the whole run did."""
        found = (at / "out").glob("checkpoint-*")
        saved = any(checkpoint_manifest.find_damage(path) is None for path in found)
        saved = saved or (at / "out" / "last.ckpt").exists()
        if not saved:
            fresh(at)
        run = self.start(at, world, resume=saved)
        assert run.wait(90) == [0] * world, run.said()
        assert self.digest(at) == self.reference(world), "other weights than uninterrupted"


POINTS = {
    "first step": (loader.PackedLoader, "_step", 0),
    "evaluation": (GenerationEval, "_evaluate", 0),
    "save": (data_state, "gather_data_state", 1),
    "end": (graceful_stop.StopRequest, "release", 0),
}
"""Named places for a signal: whose function, and how many calls of it to let pass.

At the end it comes behind the function: the training has given the signals back.
"""


def strike(owner: object, name: str, after: int, number: int) -> None:
    """Let this process be hit by a signal when it enters the function the next time but `after`."""
    original, seen = getattr(owner, name), [0]

    def struck(*args, **kwargs):
        seen[0] += 1
        if seen[0] == after + 1:
            if owner is graceful_stop.StopRequest:
                original(*args, **kwargs)
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, struck)


def signals(recipe: Recipe, number: int) -> str:
    """A signal on one rank stops all, with a whole checkpoint; a second leaves at once."""
    draw = random.Random(number)
    world, kind = draw.choice([1, 2]), draw.choice(graceful_stop.SIGNALS)
    where = draw.choice([*POINTS, "random", "random", "random", "twice"])
    victim = draw.randrange(world)
    if where == ("end" if recipe.name == "pretrain" else "evaluation"):
        where = "random"
    recipe.reference(world)
    at = fresh(recipe.folder / f"signals-{number}")

    def prepare(rank: int) -> None:
        original = graceful_stop.StopRequest.listen

        def listen(self) -> None:
            original(self)
            Path(f"listening-{rank}").touch()

        graceful_stop.StopRequest.listen = listen
        if rank == victim and where in POINTS:
            strike(*POINTS[where], kind)

    run = recipe.start(at, world, prepare=prepare)
    ready = [at / f"listening-{rank}" for rank in range(world)]
    run.wait_for(lambda: all(path.exists() for path in ready))
    sent = time.monotonic()
    if where in ("random", "twice"):
        time.sleep(draw.uniform(0, recipe.seconds))
        sent = time.monotonic()
        for _ in range(2 if where == "twice" else 1):
            for rank in range(world) if where == "twice" else (victim,):
                run.send(kind, rank)
            time.sleep(2 * graceful_stop.RELAY_SECONDS)
    codes = run.wait()
    took = time.monotonic() - sent
    ended = "second" if where == "twice" and any(codes) else where
    if ended == "second":
        for rank, code in enumerate(codes):  # whoever waited for one that had left ends by an error
            left = code == 1 and re.search("(closed|reset) by peer", run.said(rank))
            assert left or code in (0, 128 + kind), f"{codes}\n{run.said(rank)}"
    else:
        assert codes == [0] * world, f"{codes}\n{run.said()}"
        recipe.check_whole(at)
        assert "done" in run.said() or "stopped" in run.said()
    if "done: " not in run.said():
        recipe.go_on(at, world)
    return f"{ended} {took if where in ('random', 'twice') else 0:.1f}"


CRASHES = {
    "before the save": ((with_accelerate, with_hf), "save_data_state", 1),
    "state gathered, not written": ((data_state,), "write_state", 1),
    "state written": ((data_state,), "barrier", 1),
    "all written, not sealed": ((checkpoint_manifest, with_hf), "seal", 1),
    "some written": ((with_hf.PackedTrainer,), "_save_optimizer_and_scheduler", 1),
    "gathered, not written": ((accelerate.accelerator,), "save_accelerator_state", 1),
    "after the save": ((graceful_stop.StopRequest,), "should_stop", 8),
}
"""Where a save can be cut short: who has the function, and how many calls to let pass."""


def crashes(recipe: Recipe, number: int) -> str:
    """kill -9 inside a save; what is left resumes to the same weights."""
    world = 1 + number // len(CRASHES) % 2
    where = list(CRASHES)[number % len(CRASHES)]
    owners, name, after = CRASHES[where]
    recipe.reference(world)
    at = fresh(recipe.folder / f"crashes-{number}")

    def prepare(rank: int) -> None:
        for owner in owners if rank == 0 else ():
            if hasattr(owner, name):
                strike(owner, name, after, signal.SIGKILL)

    run = recipe.start(at, world, prepare=prepare)
    run.wait_for(lambda: os.waitid(os.P_PID, run.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                 is not None)  # fmt: skip
    run.kill()  # as a launcher does with the other ranks
    assert run.codes[0] in (-9, 0), run.said()
    crashed = run.codes[0] == -9
    recipe.go_on(at, world) if crashed else recipe.check_whole(at)
    return where if crashed else "nothing to crash"


def killed(recipe: Recipe, number: int) -> str:
    """kill -9 of the main process, of a data worker or of the group: nothing is left over."""
    draw = random.Random(number)
    who = draw.choice(["main", "worker", "group"])
    recipe.reference(1)
    at = fresh(recipe.folder / f"killed-{number}")
    run = recipe.start(at, 1)
    main = psutil.Process(run.pids[0])
    run.wait_for(lambda: not main.is_running() or bool(main.children()) or "done" in run.said())
    time.sleep(draw.uniform(0, 0.5 * recipe.seconds))
    try:
        children = main.children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if who == "group":
        os.killpg(run.pids[0], signal.SIGKILL)
    elif who == "worker" and children:
        draw.choice(children).kill()
    else:
        run.send(signal.SIGKILL, 0)
    run.wait(30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"orphans: {alive}"
    if run.codes[0] == 1:
        assert "data worker died" in run.said(), run.said()
    recipe.go_on(at, 1) if "done: " not in run.said() else None
    return f"{who} {run.codes[0]}"


CHANGES = ("fingerprint", "tokenizer", "budget", "seed", "version")


def changed(recipe: Recipe, number: int) -> str:
    """Another data set, tokenizer, budget, seed or packer is refused on resume, by name."""
    what = CHANGES[number % len(CHANGES)]
    at = fresh(recipe.folder / f"changed-{number}")
    own = Recipe(recipe.name, at)
    assert own.start(at, 1).wait() == [0]
    if what in ("budget", "seed"):
        own.common += [f"--{what}", "64"]
    elif what == "version":
        _other_version(at / "out")
    else:
        name = "ids.jsonl" if what == "fingerprint" else "tokenizer/tokenizer.json"
        path = at / "inputs" / name
        path.write_text(path.read_text().replace("7", "8", 1) if what == "fingerprint"
                        else path.read_text().replace("w99", "w999", 1))  # fmt: skip
    run = own.start(at, 1, resume=True)
    assert run.wait() == [2] and what in run.said().splitlines()[-1], run.said()
    return what


def _other_version(out: Path) -> None:
    if (out / "last.ckpt").exists():
        kept = torch.load(out / "last.ckpt", weights_only=True)
        kept[with_lightning.KEY]["version"] = 99
        return torch.save(kept, out / "last.ckpt")
    for folder in out.glob("checkpoint-*"):
        path = folder / data_state.STATE_FILE
        atomic_file.write_state(path, {**atomic_file.read_state(path), "version": 99})
        checkpoint_manifest.write_manifest(folder)
    return None


TRIALS = {"signals": signals, "crashes": crashes, "killed": killed, "changed": changed}


def run(recipe: Recipe, what: str, numbers: range) -> dict:
    """Take the trials of these numbers; say how they went."""
    outcomes, failures = {}, []
    for number in numbers:
        try:
            told = TRIALS[what](recipe, number)
            name = told.rpartition(" ")[0] if what == "signals" else told
            outcomes[name] = outcomes.get(name, 0) + 1
        except AssertionError as error:
            told = f"FAILED {str(error)[-9000:]}"
            failures.append([number, told])
        print(what, recipe.name, number, told, flush=True)
    return {"trials": len(numbers), "outcomes": outcomes, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", nargs="+", metavar="WHAT:RECIPE:COUNT[:FIRST]")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    compile_once()
    found = {}
    for spec in args.trials:
        what, name, count, first = [*spec.split(":"), "0"][:4]
        recipe = Recipe(name, args.folder / f"{what}-{name}", workers=int(what == "killed"))
        found[spec] = run(recipe, what, range(int(first), int(first) + int(count)))
    print(json.dumps(found))
    return int(any(each["failures"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
