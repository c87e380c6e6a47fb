"""Tests of the tests: the random schedules notice each of these faults in scheduling."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from nopad.attention import PageAllocator
from nopad.inference.requests.request import Request
from nopad.inference.scheduling import loop, step
from nopad.inference.scheduling.scheduler import Scheduler
from nopad.inference.scheduling.step import BatchParams
from random_schedules import run_schedule


def after(real, change):
    """Call the real function, then change its result."""

    def faulty(*args, **options):
        return change(real(*args, **options), *args)

    return faulty


def spoil_step(field, change):
    def faulty(step, *_):
        array = getattr(step, field)
        if len(array):
            array[...] = change(array)
        return step

    return after(step.build_step, faulty)


def forget_copies(plan, *_):
    plan.copies.clear()
    return plan


def skip_in_flight(self, start, stop):
    return (
        self.prompt_token_ids[start:stop]
        if stop <= len(self.prompt_token_ids)
        else np.zeros(stop - start, int)
    )


def preempt_the_oldest(self, max_tokens=None):
    self.running.reverse()
    try:
        return REAL["plan"](self, max_tokens)
    finally:
        self.running.reverse()


def offer_too_much(self, plan):
    REAL["commit"](self, plan)
    for request in plan.requests:
        prompt = request.prompt_token_ids[: request.num_computed + 16]
        with suppress(ValueError):
            self.pages.register(request.id, prompt, self.cache_salt)


def reuse_everything(self):
    return self.num_tokens


def keep_pages(self, owner):
    return None


def admit_without_settings(self, request):
    return None


def commit_one_more(self, plan):
    REAL["commit"](self, plan)
    for request in plan.requests:
        request.num_computed += request.num_computed < request.num_tokens - 1


REAL = {
    "plan": Scheduler.plan,
    "commit": Scheduler.commit,
}
FAULTS = {
    "slots one off": (loop, "build_step", spoil_step("kv_slots", lambda a: np.maximum(a - 1, 0))),
    "positions one off": (loop, "build_step", spoil_step("positions", lambda a: a + 1)),
    "lengths one short": (
        loop,
        "build_step",
        spoil_step("seq_lens", lambda a: np.maximum(a - 1, 1)),
    ),
    "tables reversed": (loop, "build_step", spoil_step("page_table", lambda a: a[:, ::-1].copy())),
    "draws by position off": (step, "uniform", after(step.uniform, lambda u, *_: u * 0.5)),
    "page copies forgotten": (Scheduler, "plan", after(Scheduler.plan, forget_copies)),
    "outputs lost on restart": (Request, "token_ids", skip_in_flight),
    "the oldest is preempted": (Scheduler, "plan", preempt_the_oldest),
    "prefix offered too early": (Scheduler, "commit", offer_too_much),
    "a hit covers all": (Request, "max_prefix_hit", property(reuse_everything)),
    "pages not given back": (PageAllocator, "free", keep_pages),
    "parameters of the row's last request": (BatchParams, "admit", admit_without_settings),
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
    monkeypatch.setattr(owner, name, value)
    for seed in range(400):
        try:
            run_schedule(world, expected, seed, tight=seed % 2 == 1)
        except (AttributeError, NameError):
            raise  # the seeded code itself is out of date
        except Exception:
            return
    pytest.fail("400 schedules passed")
