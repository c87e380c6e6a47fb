"""GenerationEval: when it runs, what it reports, and what it refuses."""

from __future__ import annotations

import json
import logging
import math
import sys

import pytest
import torch
from echo_eval import EXAMPLES, Done, echo, equal
from nopad.trainer.evaluation import Example, GenerationEval
from nopad.trainer.evaluation import generation_eval as module
from nopad.trainer.evaluation.eval_report import TableRow


def test_metrics_are_means_over_what_was_completed():
    report = GenerationEval(echo, EXAMPLES, {"exact": equal}, name="echo").run(7)
    assert report.metrics["eval/echo/exact"] == 0.75
    assert report.metrics["eval/echo/new_tokens"] == 8
    assert report.rows[1] == TableRow("b", "b", "x", {"exact": 0.0}, [1, 2])


def test_a_conversation_is_shown_as_one_and_no_reference_as_nothing():
    turns = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How\nmany?"}]

    def answers(prompts, params, deadline):
        return [Done("4") for _ in prompts]

    rows = GenerationEval(answers, [Example(turns), Example([1, 2])]).run(1).rows
    assert rows == [
        TableRow("system: Count.\nuser: How\nmany?", "4", "", {}, [1, 2]),
        TableRow("[1, 2]", "4", "", {}, [1, 2]),
    ]


def test_what_failed_came_late_or_was_cut_off_is_counted():
    def some(prompts, params, deadline):
        late, cut = Done("c", None, "deadline"), Done("d", None, "length")
        return [Done("a"), Done("", "too long", "error"), late, cut]

    report = GenerationEval(some, EXAMPLES, {"exact": equal}).run(1)
    names = ("exact", "examples", "failed", "timed_out", "truncated")
    assert [report.metrics[f"eval/{k}"] for k in names] == [1.0, 2, 1, 1, 1]
    assert report.error == "example 1: too long"


def test_all_completions_of_every_evaluation_are_appended_to_a_file(tmp_path):
    path = tmp_path / "new" / "completions.jsonl"

    def two(prompts, params, deadline):
        return [
            Done("a", others=(Done("\ud800"),)),
            Done("", "too long", "error"),
            *map(Done, "cd"),
        ]

    def length(text, reference):
        return math.nan if text == "c" else len(text)

    metrics = {"exact": equal, "length": length}
    made = GenerationEval(two, EXAMPLES, metrics, num_samples=1, name="two", output=path)
    assert len(made.run(5).rows) == 1 and made.run(10).error == "example 1: too long"
    GenerationEval(echo, EXAMPLES[:1], output=str(path)).run(15)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [5] * 4 + [10] * 4 + [15]
    assert [row | {"step": 5} for row in rows[4:8]] == rows[:4]
    assert [row["completion"] for row in rows[:4]] == ["a", "\ud800", "c", "d"]
    assert rows[2] == {
        "step": 5, "evaluation": "two", "prompt": "c", "completion": "c", "reference": "c",
        "scores": {"exact": 1.0, "length": None}, "token_ids": [1, 2],
    }  # fmt: skip


def test_a_file_that_cannot_be_written_costs_no_metric(tmp_path, caplog):
    (tmp_path / "file").touch()
    made = GenerationEval(echo, EXAMPLES, {"exact": equal}, output=tmp_path / "file" / "a.jsonl")
    report = made.run(1)
    assert report.metrics["eval/exact"] == 0.75
    assert "a.jsonl" in report.error and "completions are not saved" in caplog.text


def test_an_error_is_reported_or_raised_as_asked(caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    report = GenerationEval(broken, EXAMPLES).run(3)
    assert report.error == "RuntimeError: no memory" and report.rows == []
    assert "after step 3" in caplog.text
    with pytest.raises(RuntimeError, match="no memory"):
        GenerationEval(broken, EXAMPLES, on_error="raise").run(3)


def raises_unless_a(text, reference):
    if text != "a":
        raise KeyError(text)
    return 1.0


def test_a_metric_that_raises_on_some_examples_has_no_mean():
    metrics = {"some": raises_unless_a, "exact": equal}
    evaluation = GenerationEval(echo, EXAMPLES, metrics, monitor="some")
    report = evaluation.run(1)
    assert report.missing == ("eval/some",) and not report.is_best and evaluation.best is None
    assert report.metrics["eval/exact"] == 0.75 and report.metrics["eval/examples"] == 4
    assert report.error == "metric 'some' on example 1: KeyError: 'b' (and 2 more)"
    assert report.rows[0].scores == {"some": 1.0, "exact": 1.0}


@pytest.mark.parametrize("value", [{"f1": 1.0}, None, torch.ones(2), "good"])
def test_a_metric_that_returns_no_number_is_told_beside_other_errors(value, caplog):
    def some(prompts, params, deadline):
        return [Done("a"), Done("", "too long", "error"), Done("c"), Done("d")]

    metrics = {"some": raises_unless_a, "odd": lambda text, reference: value}
    report = GenerationEval(some, EXAMPLES, metrics).run(1)
    assert report.missing == ("eval/some", "eval/odd")
    returned = f"it returned a {type(value).__name__}, not a number (and 2 more)"
    assert report.error == (
        "example 1: too long; metric 'some' on example 2: KeyError: 'c' (and 1 more); "
        f"metric 'odd' on example 0: {returned}"
    )
    assert report.error in caplog.text
    with pytest.raises(ValueError, match=r"metric 'some' on example 2.*metric 'odd' on example 0"):
        GenerationEval(some, EXAMPLES, metrics, on_error="raise").run(1)
    with pytest.raises(ValueError, match="metric 'acc' is a"):
        GenerationEval(lambda deadline: {"acc": [value]}, on_error="raise").run(1)


def test_a_request_that_failed_is_counted_and_not_raised():
    def some(prompts, params, deadline):
        return [Done("a"), Done("", "too long", "error"), Done("c"), Done("d")]

    report = GenerationEval(some, EXAMPLES, {"exact": equal}, on_error="raise").run(1)
    assert (report.metrics["eval/exact"], report.metrics["eval/failed"]) == (1.0, 1)


def test_all_samples_of_a_prompt_are_scored():
    def three(prompts, params, deadline):
        late = Done("c", None, "deadline")
        return [Done(p, others=(Done("a"), late if p == "c" else Done("x"))) for p in prompts]

    evaluation = GenerationEval(three, EXAMPLES, {"exact": equal}, num_samples=3, deadline=9.0)
    report = evaluation.run(1)
    names = ("exact", "examples", "timed_out", "new_tokens")
    assert [report.metrics[f"eval/{k}"] for k in names] == [5 / 11, 11, 1, 24]
    assert [row.completion for row in report.rows] == ["a", "a", "x"]


def test_prompts_do_not_get_into_the_log(caplog):
    caplog.set_level(logging.DEBUG)

    def bad(text, reference):
        raise ValueError("cannot")

    secret = [Example("the password is swordfish", "swordfish")]
    GenerationEval(echo, secret, {"bad": bad}).run(1)
    assert "metric 'bad' on example 0" in caplog.text and "swordfish" not in caplog.text


def test_a_harness_brings_its_own_metrics():
    calls = []

    def harness(deadline=None):
        calls.append(deadline)
        return {"arc/acc": 0.5}

    report = GenerationEval(harness, deadline=9.0).run(1)
    assert report.metrics["eval/arc/acc"] == 0.5 and calls == [9.0]


def test_due_every_so_many_steps_and_at_the_end():
    often = GenerationEval(echo, EXAMPLES, every=3)
    assert [step for step in range(8) if often.due(step, last=step == 7)] == [3, 6, 7]
    assert not GenerationEval(echo, EXAMPLES).due(3)


def test_the_best_value_is_remembered_also_over_a_checkpoint():
    values = iter([0.2, 0.5, 0.4, 0.6])

    def source(deadline=None):
        return {"acc": next(values)}

    first = GenerationEval(source, monitor="acc")
    assert [first.run(i).is_best for i in range(2)] == [True, True]
    second = GenerationEval(source, monitor="acc")
    second.load_state_dict(first.state_dict())
    assert [second.run(i).is_best for i in range(2)] == [False, True]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_not_finite_is_never_the_best(mode):
    values = iter([math.nan, math.inf, -math.inf, 0.5, math.nan, 0.5])
    evaluation = GenerationEval(lambda deadline: {"acc": next(values)}, monitor="acc", mode=mode)
    evaluation.load_state_dict({"best": math.nan})  # as checkpoints of old have it
    assert [evaluation.run(i).is_best for i in range(6)] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert evaluation.best == 0.5


def test_the_best_of_other_evaluations_is_not_taken_over():
    from nopad.trainer.evaluation.generation_eval import eval_states, load_eval_states

    first, second = (GenerationEval(lambda **_: {}, name=name) for name in ("a", "b"))
    first.best, second.best = 0.5, 0.25
    kept = eval_states([first, second])
    first.best = second.best = None
    load_eval_states([first, second], kept)
    assert (first.best, second.best) == (0.5, 0.25)
    with pytest.raises(
        ValueError, match=r"the best values of 2 evaluations, but there are 1: pass"
    ):
        load_eval_states([first], kept)


def test_a_watched_metric_that_a_harness_does_not_have_is_told_of_once(caplog):
    evaluation = GenerationEval(lambda deadline: {"arc/acc": 1.0, "b": 0}, monitor="arc/acuracy")
    assert not any(evaluation.run(i).is_best for i in range(3))
    assert caplog.text.count("monitor='arc/acuracy' is not reported; the closest names are") == 1
    assert "['arc/acc', 'b']" in caplog.text


def test_a_harness_value_that_is_no_number_is_told_of_and_spoils_no_other():
    results = {"text": "0.5 good", "unfinished": None, "acc": 0.5, "both": torch.tensor([1.0, 2.0])}
    report = GenerationEval(lambda deadline: results, monitor="text").run(1)
    assert report.error == "metric 'text' is a str; it must be a number (and 2 more)"
    assert report.metrics["eval/acc"] == 0.5 and not report.is_best
    assert all(
        math.isnan(report.metrics[f"eval/{name}"]) for name in ("text", "unfinished", "both")
    )


def test_every_metric_without_a_value_is_named():
    def bad(text, reference):
        raise ValueError("cannot")

    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    report = GenerationEval(echo, EXAMPLES, {"exact": equal, "bad": bad}, name="n").run(1)
    assert report.missing == ("eval/n/bad",) and math.isnan(report.values()["eval/n/bad"])
    assert report.values()["eval/n/exact"] == 0.75
    report = GenerationEval(broken, EXAMPLES, {"exact": equal}, monitor="new_tokens").run(1)
    assert report.missing == ("eval/exact", "eval/new_tokens")
    answers = iter([{}, {"arc": 1.0}, {}])
    harness = GenerationEval(lambda deadline: next(answers))
    told = [harness.reports("eval/any"), *(harness.run(i).missing for i in range(3))]
    assert told == [True, (), (), ("eval/arc",)]
    assert harness.reports("eval/arc") and not harness.reports("eval/any")


@pytest.mark.parametrize("where", ["source", "metric"])
def test_an_exit_inside_an_evaluation_ends_the_run(where):
    def leave(*args, **kwargs):
        sys.exit(3)

    source, metric = (leave, equal) if where == "source" else (echo, leave)
    with pytest.raises(SystemExit) as left:
        GenerationEval(source, EXAMPLES, {"exact": metric}).run(1)
    assert left.value.code == 3


def test_examples_may_come_from_a_generator():
    report = GenerationEval(echo, (e for e in EXAMPLES), {"exact": equal}).run(1)
    assert report.metrics["eval/exact"] == 0.75 and report.metrics["eval/examples"] == 4


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"every": "5"}, {"every": 2.5}, {"max_time_share": 1.5}, {"deadline": 0},
     {"deadline": math.nan}, {"on_error": "hide"}, {"every": True}, {"num_samples": "a"},
     {"num_samples": -1}, {"max_time_share": "x"}, {"deadline": "x"}],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GenerationEval(echo, EXAMPLES, **wrong)


@pytest.mark.parametrize(
    ("generate", "settings", "word"),
    [
        (object(), {}, "generate is a object"),
        (echo, {"examples": [("2+2=", "4")]}, "example 0 is a tuple"),
        (echo, {"examples": []}, "empty"),
        (echo, {"output": "."}, r"output='\.' is a folder; pass the path of a JSONL file"),
        (echo, {"output": True}, "output is a bool; pass the path of a JSONL file"),
        (echo, {"output": "a.jsonl", "examples": None}, "output='a.jsonl' needs examples"),
        (echo, {"metrics": {"exact": 0.5}}, "metric 'exact' is a float"),
        (echo, {"metrics": equal}, "metrics is a function; pass a dict of functions by name"),
        (echo, {"metrics": {"seconds": equal}}, "metric name 'seconds' is reserved"),
        (echo, {"metrics": {"failed": equal}}, "metric name 'failed' is reserved"),
        (
            echo,
            {"metrics": {"exact": equal}, "monitor": "exat"},
            r"monitor='exat' is not a metric: there are \['exact",
        ),
    ],
)
def test_what_every_evaluation_would_only_report_is_refused_at_once(generate, settings, word):
    with pytest.raises(ValueError, match=word):
        GenerationEval(generate, **{"examples": EXAMPLES, **settings})


def test_random_states_are_put_back_whatever_a_metric_draws(monkeypatch):
    from contextlib import nullcontext

    def noisy(text, reference):
        return float(torch.rand(()))

    def changes() -> bool:
        before = torch.get_rng_state()
        GenerationEval(echo, EXAMPLES, {"noisy": noisy}).run(1)
        return not torch.equal(before, torch.get_rng_state())

    assert not changes()
    monkeypatch.setattr(module, "preserve_rng", nullcontext)
    assert changes(), "the test would see it"
