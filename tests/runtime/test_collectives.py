"""What ranks exchange: an error, an interrupt or an exit on one of two ranks reaches both."""

from pathlib import Path

import pytest
import tiny_run
from nopad.runtime import all_ranks_or_none, barrier, gather_objects, sum_over_ranks

CHILD = Path(__file__).parent / "support" / "runtime_child.py"


def on_two_ranks(case):
    """The outcomes of a case on both ranks; the group must be in step afterwards."""
    outcomes = tiny_run.launch(CHILD, case, timeout=120)
    assert all(outcome.pop("after") == [0, 1] for outcome in outcomes)
    return outcomes


def test_every_rank_gets_the_results_of_all():
    assert on_two_ranks("results") == [{"result": [0, 10]}] * 2


def test_an_error_on_one_rank_is_raised_on_all():
    other, failed = on_two_ranks("error")
    assert failed == {"type": "ValueError", "message": "no such file"}
    assert other == {"type": "RankError", "message": "rank 1 failed: ValueError: no such file"}


@pytest.mark.parametrize("case", ["interrupt", "interrupt and error"])
def test_ctrl_c_on_one_rank_is_ctrl_c_on_all(case):
    assert [outcome["type"] for outcome in on_two_ranks(case)] == ["KeyboardInterrupt"] * 2


@pytest.mark.parametrize(
    ("case", "message"), [("exit", "stopping early"), ("exit and error", "enough")]
)
def test_an_exit_on_one_rank_is_an_exit_on_all(case, message):
    other, exited = on_two_ranks(case)
    assert exited == {"type": "SystemExit", "message": message}
    assert other == {"type": "SystemExit", "message": f"rank 1 exited: SystemExit: {message}"}


def test_sums_objects_and_barriers_span_the_ranks():
    outcomes = on_two_ranks("facts")
    shared = [2, [{"rank": 0}, {"rank": 1}], 4.0]
    assert [outcome["result"] for outcome in outcomes] == [[0, *shared], [1, *shared]]


def test_random_states_of_all_ranks_are_saved_and_restored():
    assert on_two_ranks("random states") == [{"result": True}] * 2


def test_without_a_group_there_is_one_rank():
    barrier()
    assert all_ranks_or_none(lambda: 3) == [3]
    assert gather_objects("x") == ["x"] and sum_over_ranks(2.5).item() == 2.5
    with pytest.raises(ZeroDivisionError):
        all_ranks_or_none(lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        all_ranks_or_none(_interrupt)


def _interrupt():
    raise KeyboardInterrupt
