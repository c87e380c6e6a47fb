"""N steps with evaluations in between are bitwise N steps without, in every trainer (C1)."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import untouched
import warm_python
from nopad.trainer.evaluation import generation_eval

SUPPORT = Path(__file__).parents[1] / "support"

STEPS = {"fast": (9, 3), "whole": (200, 10)}


def train(trainer: str, how: str | None, end: str, steps: int, every: int, folder):
    """Run it; the notes taken after evaluations, and the state at the end if it came to one."""
    torch.set_num_threads(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    diary = untouched.Diary(how, end, every)
    try:
        final = untouched.TRAINERS[trainer](diary, steps, folder)
    except (KeyboardInterrupt, SystemExit):
        assert end == "interrupted", "nothing else may stop the run"
        final = None
    return diary, final


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without evaluations, once for each trainer and length."""
    kept: dict = {}

    def get(trainer: str, steps: int, every: int):
        key = trainer, steps
        if key not in kept:
            folder = tmp_path_factory.mktemp("plain")
            kept[key] = train(trainer, None, "ends", steps, every, folder)
        return kept[key]

    return get


SMOKE = {
    "hf": pytest.mark.smoke("no trace", "HF Trainer"),
    "accelerate": pytest.mark.smoke("no trace", "Accelerate"),
    "lightning": pytest.mark.smoke("no trace", "Lightning"),
}


def marks(trainer: str, how: str, end: str, length: str) -> list[pytest.MarkDecorator]:
    if is_longer(how, end, length):
        return [pytest.mark.slow]
    return [SMOKE[trainer]] if (how, end) == ("sampled", "ends") else []


def is_longer(how: str, end: str, length: str) -> bool:
    """Sampling restores all that greedy decoding does, and the random states."""
    return length == "whole" or how == "greedy"


CELLS = [
    pytest.param(
        trainer,
        how,
        end,
        length,
        marks=marks(trainer, how, end, length),
        id=f"{trainer}-{how}-{end}-{length}",
    )
    for length in STEPS
    for trainer in untouched.TRAINERS
    for how in untouched.PARAMS
    for end in ("ends", "raises", "interrupted")
]


@pytest.mark.parametrize(("trainer", "how", "end", "length"), CELLS)
def test_training_with_evaluations_is_bitwise_training_without(
    trainer, how, end, length, plain, tmp_path
):
    steps, every = STEPS[length]
    without, unevaluated = plain(trainer, steps, every)
    diary, final = train(trainer, how, end, steps, every, tmp_path)
    expected = 1 if end == "interrupted" else steps // every
    assert len(diary.notes) == expected
    for number, (note, other) in enumerate(zip(diary.notes, without.notes, strict=False)):
        assert {k for k in other if note[k] != other[k]} == set(), f"evaluation {number}"
    if end == "interrupted":
        assert final is None, "Ctrl-C stops the run"
        return
    assert {k for k in unevaluated if final[k] != unevaluated[k]} == set()
    told = [report.error is not None for report in diary.reports]
    assert told == [end == "raises"] * expected
    if end == "ends":
        assert all(report.metrics["eval/examples"] == 3 for report in diary.reports)


def _forgetting_flags(modules):
    for part in modules:
        part.training = False
    return nullcontext()


def _forgetting_attention(modules):
    modules[0].config._attn_implementation_internal = "eager"
    return nullcontext()


@pytest.mark.parametrize(
    ("fault", "seen"),
    [("_eval_mode", "flags"), ("nopad_attention", "attention"), ("preserve_rng", "torch")],
)
def test_an_engine_that_forgets_to_restore_is_noticed(fault, seen, plain, tmp_path, monkeypatch):
    from nopad.inference.live_model import borrow

    forgetting = {
        "_eval_mode": _forgetting_flags,
        "nopad_attention": _forgetting_attention,
        "preserve_rng": lambda device: nullcontext(),
    }
    monkeypatch.setattr(borrow, fault, forgetting[fault])
    if fault == "preserve_rng":  # held twice: by the engine, and around the metrics
        monkeypatch.setattr(generation_eval, "preserve_rng", nullcontext)
    steps, every = STEPS["fast"]
    without, _ = plain("accelerate", steps, every)
    diary = untouched.Diary("sampled", "ends", every)
    torch.set_num_threads(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with suppress(Exception):  # some of these faults break the training that follows
        untouched.TRAINERS["accelerate"](diary, steps, tmp_path)
    note, other = diary.notes[0], without.notes[0]
    assert seen in {k for k in other if note[k] != other[k]}


def test_ctrl_c_inside_an_evaluation_leaves_the_state_as_it_was(tmp_path):
    """Sent to real processes from outside; an engine that forgets to restore is noticed."""
    asked = [*untouched.TRAINERS, "accelerate:forgets"]
    done = warm_python.run([SUPPORT / "interrupted.py", tmp_path, *asked], timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == asked
    for name, told in found.items():
        changed = ["flags"] if name.endswith("forgets") else []
        assert told == {"ended": "interrupted", "changed": changed, "code": 0, "left": False}, name
