"""Evaluation on several ranks: dealt out, gathered in order, the same for any number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run

CHILD = Path(__file__).parents[1] / "support" / "evaluation_child.py"
RUNS = 8


@pytest.fixture(scope="module")
def one():
    return tiny_run.launch(CHILD, RUNS, world=1)[0]


@pytest.fixture(scope="module")
def two():
    return tiny_run.launch(CHILD, RUNS, world=2)


def test_answers_do_not_depend_on_the_number_of_ranks(one, two):
    for child in two:
        assert child["dealt"] == one["dealt"]
    assert len(one["dealt"]["greedy"]) == 12 and one["dealt"]["none"] == []


def test_the_same_prompt_given_twice_is_answered_twice(one):
    sampled = one["dealt"]["sampled"]
    assert any(sampled[i] != sampled[9 + i] for i in range(3))


def test_reports_are_the_same_on_all_ranks_and_for_any_number_of_them(one, two):
    for child in two:
        for kind in ("good", "too long", "metric"):
            assert child["reports"][kind] == one["reports"][kind], kind
    metrics, error, best, rows = one["reports"]["good"]
    assert error is None and best and len(rows) == 4 and metrics["eval/examples"] == 9


def test_a_bad_example_and_a_bad_metric_are_named(one):
    good = one["reports"]["good"][0]
    metrics, error, _, _ = one["reports"]["too long"]
    assert "example 9: the prompt has 177 tokens" in error
    assert metrics["eval/failed"] == 1 and metrics["eval/length"] == good["eval/length"]
    metrics, error, _, _ = one["reports"]["metric"]
    assert "metric 'bad' on example 0: ZeroDivisionError" in error
    assert metrics["eval/length"] == good["eval/length"]


def test_an_error_on_one_rank_is_raised_on_all_and_none_waits(two):
    first, second = (child["faults"] for child in two)
    assert second["raises"] == second["strict"] == "ValueError: seeded"
    assert "rank 1 failed: ValueError: seeded" in first["raises"]
    assert "rank 1 failed: ValueError: seeded" in first["strict"]
    assert first["interrupted"].startswith("KeyboardInterrupt")
    assert second["interrupted"].startswith("KeyboardInterrupt")
    assert second["left"] == "SystemExit: seeded"
    assert first["left"] == "SystemExit: rank 1 exited: SystemExit: seeded"
    assert [child["reports"]["broken"].split(":")[-1] for child in two] == [" seeded"] * 2


def test_under_fsdp2_evaluations_leave_no_trace_and_see_the_whole_model(one, two):
    for child in (one, *two):
        (with_them, kinds, texts, _), (without, *_) = child["sharded"]
        assert with_them == without
        assert kinds == ["DTensor"]
        assert len(texts) == 3 and all(error is None and rows for error, rows in texts)
    assert two[0]["sharded"] == two[1]["sharded"]
    assert two[0]["sharded"][0][2][0][1][0] == one["sharded"][0][2][0][1][0]


def test_without_room_for_whole_parameters_all_ranks_step_together(one, two):
    """At last with one prompt for two ranks: one of them runs nothing of its own."""
    for child in (one, *two):
        (digest, kinds, texts, single), (whole, _, want, _) = child["locked"], child["sharded"][0]
        assert digest == whole and kinds == ["DTensor"]
        assert texts == want
        assert len(single) == 1 and len(single[0]) == 5
    assert two[0]["locked"] == two[1]["locked"]


def test_in_lock_step_an_error_on_one_rank_reaches_all(two):
    for child in two:
        digest, kinds, texts, _ = child["locked, broken"]
        assert digest == child["sharded"][1][0] and kinds == ["DTensor"]
        assert all("seeded" in error and rows == [] for error, rows in texts) and len(texts) == 3


def test_ranks_that_share_a_model_run_the_same_requests(one, two):
    """By tensor parallelism, with caches of different sizes: they have to plan the same steps."""
    for child in two:
        answers, own, late = child["tensor parallel"]
        want = one["dealt"]
        assert {**answers, "scores": []} == {**want, "scores": []}
        for row, wanted in zip(answers["scores"], want["scores"], strict=True):
            assert row == pytest.approx(wanted, abs=1e-3)
        assert own == two[0]["tensor parallel"][1]
        assert "deadline= cannot be used with tensor parallelism" in late


def test_uneven_ranks_never_hang(one, two):
    assert [child["uneven"] for child in (one, *two)] == [RUNS] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_ranks_never_hang_in_200_runs(world):
    children = tiny_run.launch(CHILD, 200, world=world, timeout=500)
    assert [child["uneven"] for child in children] == [200] * world
