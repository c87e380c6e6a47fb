"""What trainers' own callbacks look at: best checkpoints, early stops, and the end of training."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.evaluation.time_budget import EvalPlan
from nopad.trainer.with_hf import EvalCallback as HFEvalCallback
from nopad.trainer.with_lightning import EvalCallback
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments


def scores(*values: float | str):
    """A harness whose metric takes these values, one after the other; a text is raised."""
    left = iter(values)

    def source(deadline=None):
        if isinstance(value := next(left), str):
            raise RuntimeError(value)
        return {"acc": value}

    return source


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).mean()

    def validation_step(self, batch, _):
        self.log("loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, evaluation, *callbacks, **settings):
    """Train eight batches an epoch; return the trainer, and the steps that were evaluated."""
    run, steps = evaluation.run, []

    def noted(step, *args):
        steps.append(step)
        return run(step, *args)

    evaluation.run = noted
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=[EvalCallback(evaluation), *callbacks],
        **{"max_steps": 8, "logger": False, **settings},
    )  # fmt: skip
    data = [DataLoader(torch.ones(16, 1), batch_size=2) for _ in range(2)]
    trainer.fit(Module(), *data)
    return trainer, steps


def best(folder, **settings):
    name = "{step}-{eval/acc:.1f}"
    return ModelCheckpoint(
        folder, name, "eval/acc", mode="max", auto_insert_metric_name=False, **settings
    )


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("given", [("broken", 0.5), (0.75, "broken")])
def test_lightning_gives_a_failed_evaluation_no_score_and_trains_on(tmp_path, every, given):
    kept = best(tmp_path, save_top_k=-1)
    evaluation = GenerationEval(scores(*given), every=every)
    trainer, steps = fit(tmp_path, evaluation, kept, val_check_interval=4)
    assert trainer.global_step == 8 and steps == [4, 8]
    good = next(value for value in given if not isinstance(value, str))
    found = [float(score) for score in kept.best_k_models.values()]
    assert found == [-math.inf if isinstance(value, str) else value for value in given]
    assert float(kept.best_model_score) == good


def test_lightning_gives_an_evaluation_that_was_left_out_no_score(tmp_path):
    kept = best(tmp_path, save_top_k=-1)
    evaluation = GenerationEval(scores(0.75), monitor="acc")
    plans = iter([EvalPlan(1, None), EvalPlan(0, None, "skipped")])
    evaluation.budget.plan = lambda *_: next(plans)
    trainer, _ = fit(tmp_path, evaluation, kept, val_check_interval=4)
    assert [float(score) for score in kept.best_k_models.values()] == [0.75, -math.inf]
    assert math.isnan(trainer.callback_metrics["eval/acc"])


def test_lightning_stops_early_by_what_is_found_and_says_what_nan_would_do(tmp_path, caplog):
    def run(*values, **settings):
        caplog.clear()
        stop = EarlyStopping("eval/acc", mode="max", patience=3, **settings)
        return fit(tmp_path, GenerationEval(scores(*values)), stop, limit_train_batches=1)[0]

    values = ["broken", 0.5, "broken", 0.6, 0.6, 0.6, 0.6, 0.6]
    assert run(*values, check_finite=False).global_step == 7
    assert "check_finite" not in caplog.text
    assert run(*values).global_step == 1
    assert "EarlyStopping('eval/acc') stops when an evaluation has no value" in caplog.text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"limit_val_batches": 0}, [8]),
        ({"limit_val_batches": 0, "max_steps": 5}, [5]),
        ({"limit_val_batches": 0, "max_steps": -1, "max_epochs": 2}, [16]),
        ({"val_check_interval": 4}, [4, 8]),
        ({"val_check_interval": 4, "max_steps": 6}, [4, 6]),
        ({"every": 3, "max_steps": -1, "max_epochs": 1}, [3, 6, 8]),
        ({"every": 4}, [4, 8]),
    ],
)
def test_lightning_evaluates_after_the_last_step_once(tmp_path, settings, wanted):
    settings = dict(settings)
    evaluation = GenerationEval(scores(*[0.5] * 9), every=settings.pop("every", None))
    trainer, steps = fit(tmp_path, evaluation, **settings)
    assert steps == wanted and float(trainer.callback_metrics["eval/acc"]) == 0.5


def test_lightning_keeps_the_last_weights_by_the_last_evaluation(tmp_path):
    kept = best(tmp_path)
    fit(tmp_path, GenerationEval(scores(0.5)), kept, limit_val_batches=0)
    assert float(kept.best_model_score) == 0.5 and kept.best_model_path.endswith("8-0.5.ckpt")


def test_lightning_does_not_evaluate_a_run_that_is_stopped(tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 5

    _, steps = fit(tmp_path, GenerationEval(scores(0.5)), Stop(), limit_val_batches=0)
    assert steps == []


class Noted(Logger):
    """Notes the metrics of evaluations, and after how many steps they came."""

    name, version = "noted", 0

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics, step=None):
        if "eval/acc" in metrics:  # Lightning counts the steps of its rows from 0
            self.rows.append((step + 1, metrics["eval/acc"]))

    def log_hyperparams(self, *_):
        pass


@pytest.mark.parametrize("every_n", [1, 2, 50])
@pytest.mark.parametrize(("every", "wanted"), [(3, [3, 6, 8]), (4, [4, 8]), (None, [4, 8])])
def test_lightning_logs_each_evaluation_once_and_with_its_step(tmp_path, every, wanted, every_n):
    noted, values = Noted(), [0.1, 0.2, 0.3]
    evaluation = GenerationEval(scores(*values), every=every)
    settings = {"val_check_interval": 4, "log_every_n_steps": every_n}
    trainer, _ = fit(tmp_path, evaluation, logger=noted, **settings)
    assert noted.rows == list(zip(wanted, values, strict=False))
    assert float(trainer.callback_metrics["eval/acc"]) == pytest.approx(noted.rows[-1][1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).mean(), "logits": self.layer(x)}


def hf(folder, *evaluations, callbacks=(), **settings):
    """Train six steps; return the trainer, and what was logged of the metric after which steps."""
    args = TrainingArguments(
        str(folder), max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True,
        greater_is_better=True, per_device_train_batch_size=1,
        **{"logging_strategy": "no", "save_strategy": "no", "save_only_model": True, **settings},
    )  # fmt: skip
    data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 8
    trainer = Trainer(
        Model(), args, train_dataset=data, eval_dataset=data[:1], callbacks=list(callbacks)
    )
    trainer.add_callback(HFEvalCallback(trainer, *evaluations))
    trainer.train()
    logged = [(h["step"], h["eval_acc"]) for h in trainer.state.log_history if "eval_acc" in h]
    return trainer, logged


def saved(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_hf_evaluations_of_two_rhythms_share_the_best_metric(tmp_path):
    settings = {"eval_strategy": "steps", "metric_for_best_model": "acc", "save_strategy": "best"}
    evaluation = GenerationEval(scores(0.1, 0.5, 0.7), every=2)
    trainer, logged = hf(tmp_path, evaluation, eval_steps=3, **settings)
    assert logged == [(2, 0.1), (4, 0.5), (6, 0.7)]
    assert trainer.state.best_metric == 0.7 and trainer.state.best_global_step == 6
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_hf_saves_a_new_best_of_a_step_that_the_trainer_evaluates_too(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "acc"}
    saving = {"save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True}
    early = [EarlyStoppingCallback(2)]  # it compares with the best before, so that must be unknown
    evaluation = GenerationEval(scores(0.9, 0.5, 0.3), every=2)
    trainer, _ = hf(tmp_path, evaluation, callbacks=early, **settings, **saving)
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")


def test_hf_names_a_best_metric_that_nobody_finds(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "acuracy"}
    with pytest.raises(KeyError, match="eval_acuracy"):
        hf(tmp_path, GenerationEval(scores(0.1, 0.2)), **settings)


def test_hf_stops_early_also_by_a_callback_that_was_there_before(tmp_path):
    """The first evaluation fails: it has no value then, and stops nothing."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "acc"}
    evaluation = GenerationEval(scores("broken", 0.5, 0.5, 0.5, 0.5, 0.5))
    trainer, logged = hf(tmp_path, evaluation, callbacks=[EarlyStoppingCallback(2)], **settings)
    assert trainer.state.global_step == 4 and [step for step, _ in logged] == [2, 3, 4]


@pytest.mark.parametrize(
    ("every", "settings", "wanted"),
    [
        (None, {"eval_strategy": "no"}, [6]),
        (None, {"eval_strategy": "steps", "eval_steps": 4}, [4, 6]),
        (None, {"eval_strategy": "epoch"}, [6]),
        (None, {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 9}, [6]),
        (4, {"eval_strategy": "no"}, [4, 6]),
        (6, {"eval_strategy": "epoch"}, [6]),
    ],
)
def test_hf_evaluates_after_the_last_step_once(tmp_path, every, settings, wanted):
    _, logged = hf(tmp_path, GenerationEval(scores(*[0.5] * 9), every=every), **settings)
    assert [step for step, _ in logged] == wanted


def test_hf_does_not_evaluate_a_run_again_that_was_done(tmp_path):
    evaluation = GenerationEval(scores(0.5, 0.25))
    trainer, logged = hf(tmp_path, evaluation)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, HFEvalCallback)]
    given = trainer.args, trainer.state, trainer.control
    callback.on_train_begin(*given)
    callback.on_epoch_end(*given)
    again = [h["eval_acc"] for h in trainer.state.log_history if "eval_acc" in h]
    assert logged == [(6, 0.5)] and again == [0.5]


def test_hf_saves_the_last_weights_where_only_they_are_evaluated(tmp_path):
    settings = {"metric_for_best_model": "acc", "save_strategy": "best"}
    trainer, _ = hf(tmp_path, GenerationEval(scores(0.5)), **settings)
    assert trainer.state.best_metric == 0.5 and saved(tmp_path) == ["checkpoint-6"]


@pytest.mark.parametrize("every", [None, 2, 3])
@pytest.mark.parametrize(
    "settings", [{"logging_strategy": "steps", "logging_steps": 2}, {"logging_strategy": "epoch"}]
)
def test_hf_logs_the_losses_of_training_as_without_evaluations(tmp_path, every, settings):
    def losses(*evaluations):
        trainer, _ = hf(tmp_path, *evaluations, **settings)
        return [(h["step"], h["loss"]) for h in trainer.state.log_history if "loss" in h]

    torch.manual_seed(0)
    without = losses()
    torch.manual_seed(0)
    assert without and losses(GenerationEval(scores(*[0.5] * 9), every=every)) == without


def test_hf_evaluates_other_weights_of_the_same_step_anew(tmp_path):
    trainer, _ = hf(tmp_path, GenerationEval(scores(0.5, 0.25)))
    assert trainer.evaluate()["eval_acc"] == 0.25
