"""Tests of the tests: mistakes one could make in scheduling, each of which the fuzz must notice."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from nopad.attention import PageAllocator
from nopad.inference.requests.request import Request
from nopad.inference.scheduling import loop, step
from nopad.inference.scheduling.scheduler import Scheduler
from nopad.inference.scheduling.slot_params import SlotParams


def schedules():
    """The fuzz of test_schedules, which cannot be imported by name."""
    path = Path(__file__).with_name("test_schedules.py")
    spec = importlib.util.spec_from_file_location("schedules", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run_schedule


def after(real, change):
    """Call the real thing, then spoil what it gave."""

    def faulty(*args, **options):
        return change(real(*args, **options), *args)

    return faulty


def spoil_step(field, change):
    def faulty(step, *_):
        array = getattr(step, field)
        if len(array):
            array[...] = change(array)
        return step

    return after(step.build, faulty)


def forget_copies(plan, *_):
    plan.copies.clear()
    return plan


def skip_in_flight(self, start, stop):
    return self.prompt[start:stop] if stop <= len(self.prompt) else np.zeros(stop - start, int)


def preempt_the_oldest(self, request, length):
    self.running.reverse()
    try:
        return REAL["grow"](self, request, length)
    finally:
        self.running.reverse()


def offer_too_much(self, request, start):
    request.computed += 16
    try:
        REAL["offer"](self, request, start)
    except ValueError:
        pass
    finally:
        request.computed -= 16


def reuse_everything(self):
    return self.length


def release_without_pages(self, request):
    self.running.remove(request)
    self._slots.append(request.slot)
    request.slot, request.held = -1, 0


def admit_without_settings(self, request):
    return None


def commit_one_more(self, plan):
    REAL["commit"](self, plan)
    for request in plan.requests:
        request.computed += request.computed < request.length - 1


REAL = {
    "grow": Scheduler._grow,
    "offer": Scheduler._offer,
    "commit": Scheduler.commit,
}
FAULTS = {
    "slots one off": (loop, "build", spoil_step("slots", lambda a: np.maximum(a - 1, 0))),
    "positions one off": (loop, "build", spoil_step("positions", lambda a: a + 1)),
    "lengths one short": (loop, "build", spoil_step("lengths", lambda a: np.maximum(a - 1, 1))),
    "tables reversed": (loop, "build", spoil_step("table", lambda a: a[:, ::-1].copy())),
    "draws by position off": (step, "uniforms", after(step.uniform, lambda u, *_: u * 0.5)),
    "page copies forgotten": (Scheduler, "plan", after(Scheduler.plan, forget_copies)),
    "outputs lost on restart": (Request, "tokens", skip_in_flight),
    "the oldest is preempted": (Scheduler, "_grow", preempt_the_oldest),
    "prefix offered too early": (Scheduler, "_offer", offer_too_much),
    "a hit covers all": (Request, "reusable", property(reuse_everything)),
    "pages not given back": (Scheduler, "_release", release_without_pages),
    "settings of the slot's last tenant": (SlotParams, "admit", admit_without_settings),
    "one token too many counted": (Scheduler, "commit", commit_one_more),
    "an owner's pages in any order": (
        PageAllocator,
        "pages",
        after(PageAllocator.pages, lambda pages, *_: pages[::-1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzz_notices(world, expected, fault, monkeypatch):
    owner, name, value = FAULTS[fault]
    run = schedules()
    monkeypatch.setattr(owner, name, value)
    for seed in range(400):
        try:
            run(world, expected, seed, tight=seed % 2 == 1)
        except Exception:
            return
    pytest.fail("400 schedules passed")
