"""GenerationEval: when it runs, what it may cost, what it tells whom, and best checkpoints."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field

import pytest
import tiny_run
import torch
from nopad.trainer.evaluation import Example, GenerationEval, Report
from nopad.trainer.evaluation import generation_eval as module
from nopad.trainer.evaluation.budget import Budget
from nopad.trainer.evaluation.report import Row
from nopad.trainer.evaluation.tables import show


@dataclass
class Done:
    """A completion."""

    text: str
    error: str | None = None
    finish_reason: str = "stop"
    tokens: list[int] = field(default_factory=lambda: [1, 2])


def echo(prompts, params=None, deadline=None):
    return [Done(str(prompt)) for prompt in prompts]


def equal(text, reference):
    return float(text == reference)


EXAMPLES = [Example("a", "a"), Example("b", "x"), Example("c", "c"), Example("d", "d")]


def test_metrics_are_means_over_what_was_completed():
    report = GenerationEval(echo, EXAMPLES, {"exact": equal}, name="echo").run(7)
    assert report.metrics["eval/echo/exact"] == 0.75
    assert report.metrics["eval/echo/new_tokens"] == 8
    assert report.rows[1] == Row("b", "b", "x", {"exact": 0.0})


def test_a_conversation_is_shown_as_one_and_no_reference_as_nothing():
    turns = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How\nmany?"}]

    def answers(prompts, params, deadline):
        return [Done("4") for _ in prompts]

    rows = GenerationEval(answers, [Example(turns), Example([1, 2])]).run(1).rows
    assert rows == [Row("system: Count.\nuser: How\nmany?", "4", ""), Row("[1, 2]", "4", "")]


def test_what_failed_or_came_late_is_counted_and_does_not_count():
    def some(prompts, params, deadline):
        return [Done("a"), Done("", "too long", "error"), Done("c", None, "deadline"), Done("d")]

    report = GenerationEval(some, EXAMPLES, {"exact": equal}).run(1)
    counts = [report.metrics[f"eval/{k}"] for k in ("exact", "examples", "failed", "unfinished")]
    assert counts == [1.0, 2, 1, 1]
    assert report.error == "example 1: too long"


def test_an_error_is_reported_or_raised_as_asked(caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    report = GenerationEval(broken, EXAMPLES).run(3)
    assert report.error == "RuntimeError: no memory" and report.rows == []
    assert "after step 3" in caplog.text
    with pytest.raises(RuntimeError, match="no memory"):
        GenerationEval(broken, EXAMPLES, on_error="raise").run(3)


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

    first = GenerationEval(source, watch="acc")
    assert [first.run(i).is_best for i in range(2)] == [True, True]
    second = GenerationEval(source, watch="acc")
    second.load_state_dict(first.state_dict())
    assert [second.run(i).is_best for i in range(2)] == [False, True]


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_what_is_not_finite_is_never_the_best(lower_is_better):
    values = iter([math.nan, math.inf, -math.inf, 0.5, math.nan, 0.5])
    evaluation = GenerationEval(
        lambda deadline: {"acc": next(values)}, watch="acc", lower_is_better=lower_is_better
    )
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
    from nopad.trainer.evaluation.generation_eval import load_states, states

    first, second = (GenerationEval(lambda **_: {}, name=name) for name in ("a", "b"))
    first.best, second.best = 0.5, 0.25
    kept = states([first, second])
    first.best = second.best = None
    load_states([first, second], kept)
    assert (first.best, second.best) == (0.5, 0.25)
    with pytest.raises(ValueError, match=r"keeps the best of 2 evaluations, and there are 1: give"):
        load_states([first], kept)


def test_a_watched_metric_that_a_harness_does_not_have_is_told_of_once(caplog):
    evaluation = GenerationEval(lambda deadline: {"arc/acc": 1.0, "b": 0}, watch="arc/acuracy")
    assert not any(evaluation.run(i).is_best for i in range(3))
    assert caplog.text.count("watch='arc/acuracy' is never found; the nearest there are") == 1
    assert "['arc/acc', 'b']" in caplog.text


def test_a_harness_value_that_is_no_number_is_told_of_and_spoils_no_other():
    given = {"text": "0.5 good", "unfinished": None, "acc": 0.5, "both": torch.tensor([1.0, 2.0])}
    report = GenerationEval(lambda deadline: given, watch="text").run(1)
    assert report.error == "metric 'text' is a str; it must be a number"
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
    assert report.unknown == ("eval/n/bad",) and math.isnan(report.values()["eval/n/bad"])
    assert report.values()["eval/n/exact"] == 0.75
    report = GenerationEval(broken, EXAMPLES, {"exact": equal}, watch="new_tokens").run(1)
    assert report.unknown == ("eval/exact", "eval/new_tokens")
    answers = iter([{}, {"arc": 1.0}, {}])
    harness = GenerationEval(lambda deadline: next(answers))
    told = [harness.may_find("eval/any"), *(harness.run(i).unknown for i in range(3))]
    assert told == [True, (), (), ("eval/arc",)]
    assert harness.may_find("eval/arc") and not harness.may_find("eval/any")


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
    [{"every": 0}, {"every": "5"}, {"every": 2.5}, {"max_share": 1.5}, {"deadline": 0},
     {"deadline": math.nan}, {"on_error": "hide"}, {"every": True}, {"samples": "a"},
     {"samples": -1}, {"max_share": "x"}, {"deadline": "x"}],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GenerationEval(echo, EXAMPLES, **wrong)


@pytest.mark.parametrize(
    ("source", "settings", "word"),
    [
        (object(), {}, "source is a object"),
        (echo, {"examples": [("2+2=", "4")]}, "example 0 is a tuple"),
        (echo, {"examples": []}, "empty"),
        (echo, {"metrics": {"exact": 0.5}}, "metric 'exact' is a float"),
        (echo, {"metrics": equal}, "metrics is a function; give functions by name"),
        (echo, {"metrics": {"seconds": equal}}, "a metric is named 'seconds'"),
        (echo, {"metrics": {"failed": equal}}, "a metric is named 'failed'"),
        (echo, {"metrics": {"exact": equal}, "watch": "exat"}, r"watch='exat': there are \['exact"),
    ],
)
def test_what_every_evaluation_would_only_report_is_refused_at_once(source, settings, word):
    with pytest.raises(ValueError, match=word):
        GenerationEval(source, **{"examples": EXAMPLES, **settings})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_evaluations_stay_within_their_share_of_the_time():
    clock = Clock()
    budget = Budget(max_share=0.1, clock=clock)
    ran = []
    for _ in range(200):  # a step takes a second, an example a tenth
        clock.now += 1.0
        allowed = budget.allowance(100)
        ran.append(allowed.examples)
        seconds = 0.1 * allowed.examples
        if allowed.deadline is not None:
            seconds = min(seconds, allowed.deadline)
        clock.now += seconds
        budget.note(int(seconds / 0.1) if allowed.examples else None, seconds)
        assert budget.share <= 0.1 + 1e-6
    assert budget.share > 0.09, "the budget is used"
    assert 0 in ran and any(0 < n < 100 for n in ran), "left out, and cut down"


def test_what_the_budget_did_is_said(caplog):
    evaluation = GenerationEval(echo, EXAMPLES, max_share=0.05)
    clock = Clock()
    evaluation.budget = Budget(0.05, clock=clock)
    evaluation.budget.note(4, 40.0)
    clock.now = 10.0
    report = evaluation.run(5)
    assert report.metrics == {} and "left out" in (report.note or "")
    assert "after step 5 left out: it would take 40.0 s of 0.0 s" in caplog.text


def test_tables_go_to_whatever_takes_text_or_tables(capsys):
    told = []

    class Board:
        def add_text(self, tag, text, step):
            told.append((tag, text.splitlines()[-1], step))

    class Tables:
        def log_table(self, name, columns, data, step):
            told.append((name, columns, data, step))

    row = Row("2+2=", "4", "4", {"exact": 1.0})
    report = Report(3, {"eval/sums/exact": 1.0}, [row], name="sums")
    show(report, [Board(), Tables(), None], console=True)
    assert told[0] == ("eval/sums/samples", "| 2+2= | 4 | 4 | 1.0 |", 3)
    assert told[1][0] == "eval/sums/samples" and told[1][2:] == ([["2+2=", "4", "4", 1.0]], 3)
    said = capsys.readouterr().out
    assert said == "after 3 steps, sums: exact 1\n  '2+2=' -> '4'\n"


def test_samples_that_nobody_takes_are_told_of_once(caplog):
    from nopad.trainer.evaluation import tables

    tables._say_once.cache_clear()
    for _ in range(2):
        show(Report(3, rows=[Row("a", "b", "c")]), [None, object()])
    assert caplog.text.count("shown nowhere") == 1


def test_two_evaluations_of_one_name_would_overwrite_each_other_and_are_refused():
    from nopad.trainer.with_lightning import EvalCallback

    one, other = GenerationEval(echo, EXAMPLES), GenerationEval(echo, EXAMPLES)
    with pytest.raises(ValueError, match="2 evaluations are named ''"):
        EvalCallback(one, other)
    assert EvalCallback(one, GenerationEval(echo, EXAMPLES, name="other")).evaluations[0] is one


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


def scores(*values: float):
    """A source whose metric takes these values, one after the other."""
    left = iter(values)
    return lambda deadline=None: {"acc": next(left)}


def test_the_hf_trainer_logs_and_keeps_the_best_checkpoint(tmp_path):
    from nopad.trainer.with_hf import EvalCallback, PackedTrainer
    from transformers import TrainingArguments

    def trainer(folder, **settings):
        args = TrainingArguments(
            str(folder), max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True,
            metric_for_best_model="acc", greater_is_better=True, save_only_model=True, **settings,
        )  # fmt: skip
        data = tiny_run.dataset(epochs=None)
        return PackedTrainer(tiny_run.model(), args, None, data, eval_dataset=tiny_run.dataset(5))

    own = trainer(tmp_path / "own", save_strategy="steps", save_steps=100)
    own.add_callback(EvalCallback(own, GenerationEval(scores(0.3, 0.1, 0.5), every=2)))
    own.train()
    assert [(h["step"], h["eval_acc"]) for h in own.state.log_history if "eval_acc" in h] == [
        (2, 0.3), (4, 0.1), (6, 0.5),
    ]  # fmt: skip
    saved = sorted(path.name for path in (tmp_path / "own").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-6"], "a new best is saved, another not"

    joint = trainer(tmp_path / "joint", save_strategy="best", eval_strategy="steps", eval_steps=3)
    joint.add_callback(EvalCallback(joint, GenerationEval(scores(0.5, 0.4))))
    joint.train()
    assert joint.state.best_metric == 0.5 and joint.state.best_global_step == 3
    assert [p.name for p in (tmp_path / "joint").glob("checkpoint-*")] == ["checkpoint-3"]


def test_lightning_monitors_the_metric(tmp_path):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger
    from nopad.trainer.with_lightning import EvalCallback, PackedCallback, PackedDataModule

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_run.model()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    data = PackedDataModule(tiny_run.dataset(epochs=None))
    best = ModelCheckpoint(tmp_path, "{step}", "eval/acc", mode="max", every_n_train_steps=2)
    run = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=6, enable_progress_bar=False,
        enable_model_summary=False, logger=TensorBoardLogger(tmp_path), log_every_n_steps=1,
        callbacks=[
            PackedCallback(data), best, EvalCallback(GenerationEval(scores(0.1, 0.5, 0.2), every=2))
        ],
    )  # fmt: skip
    run.fit(Module(), data)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]
    assert float(best.best_model_score) == 0.5


def test_accelerate_hears_of_a_new_best(tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from nopad.trainer.with_accelerate import AccelerateEval

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    model = tiny_run.model()
    source = GenerationEval(scores(0.1, 0.5, 0.2), every=2, watch="acc")
    told = GenerationEval(echo, EXAMPLES, {"exact": equal}, every=4, name="echo")
    evaluations = AccelerateEval(accelerator, model, source, told)
    found = {step: evaluations.after_step(step, last=step == 5) for step in range(1, 6)}
    assert {step: [r.is_best for r in reports] for step, reports in found.items()} == {
        1: [], 2: [True], 3: [], 4: [True, False], 5: [False, False],
    }  # fmt: skip
    accelerator.end_training()
    assert any(path.stat().st_size > 500 for path in tmp_path.rglob("events*"))
