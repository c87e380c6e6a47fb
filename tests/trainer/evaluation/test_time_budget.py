"""The time budget: evaluations stay within their share of the run's time."""

from __future__ import annotations

from echo_eval import EXAMPLES, echo
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.evaluation.time_budget import TimeBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_evaluations_stay_within_their_share_of_the_time():
    clock = Clock()
    budget = TimeBudget(max_time_share=0.1, clock=clock)
    ran = []
    for _ in range(200):  # a step takes a second, an example a tenth
        clock.now += 1.0
        plan = budget.plan(100)
        ran.append(plan.num_examples)
        seconds = 0.1 * plan.num_examples
        if plan.deadline is not None:
            seconds = min(seconds, plan.deadline)
        clock.now += seconds
        budget.record(int(seconds / 0.1) if plan.num_examples else None, seconds)
        assert budget.time_share <= 0.1 + 1e-6
    assert budget.time_share > 0.09, "the budget is used"
    assert 0 in ran and any(0 < n < 100 for n in ran), "skipped, and reduced"


def test_what_the_budget_did_is_said(caplog):
    evaluation = GenerationEval(echo, EXAMPLES, max_time_share=0.05)
    clock = Clock()
    evaluation.budget = TimeBudget(0.05, clock=clock)
    evaluation.budget.record(4, 40.0)
    clock.now = 10.0
    report = evaluation.run(5)
    assert report.metrics == {} and "skipped" in (report.note or "")
    assert "after step 5 skipped: it would take 40.0 s of 0.0 s" in caplog.text
