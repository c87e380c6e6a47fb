"""Evaluations in the three front ends: metrics are logged, the best checkpoint is kept."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from echo_eval import EXAMPLES, echo, equal, scores
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.monitoring import ThroughputMeter


def test_two_evaluations_of_one_name_are_refused():
    from nopad.trainer.with_lightning import EvalCallback

    one, other = GenerationEval(echo, EXAMPLES), GenerationEval(echo, EXAMPLES)
    with pytest.raises(ValueError, match="2 evaluations are named ''"):
        EvalCallback(one, other)
    assert EvalCallback(one, GenerationEval(echo, EXAMPLES, name="other")).evaluations[0] is one


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


@pytest.mark.parametrize("kind", ["hf", "trl"])
def test_the_trainer_s_own_evaluation_may_be_by_generation_alone(tmp_path, kind):
    from hf_child import trainer
    from nopad.trainer.with_hf import EvalCallback
    from trl_run import trl_trainer

    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "acc"}
    settings |= {"gradient_accumulation_steps": 1} if kind == "trl" else {}
    settings |= {"greater_is_better": True, "save_only_model": True, "save_strategy": "steps"}
    data = tiny_run.dataset(epochs=None)
    if kind == "trl":
        run = trl_trainer(tmp_path, tiny_run.model(), data, **settings)
    else:
        run, _ = trainer(tmp_path, data, 1, **settings)
    run.add_callback(EvalCallback(run, GenerationEval(scores(0.5, 0.4, 0.3))))
    run.train()
    logged = [(h["step"], h["eval_acc"]) for h in run.state.log_history if "eval_acc" in h]
    assert logged == [(2, 0.5), (4, 0.4)]
    assert run.state.best_global_step == 2
    assert run.evaluate()["eval_acc"] == 0.3


def test_an_evaluation_of_nothing_is_refused_before_the_first_step(tmp_path):
    from hf_child import trainer
    from nopad.trainer.with_hf import EvalCallback

    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, eval_strategy="steps")
    run.add_callback(EvalCallback(run, GenerationEval(scores(0.5), every=1)))
    with pytest.raises(ValueError, match="eval_strategy='steps' has nothing to evaluate"):
        run.train()


def fit(folder, data, *callbacks, **settings):
    """Train a tiny model with Lightning."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_run.model()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    settings = {"max_steps": 1, "logger": False, "enable_checkpointing": False, **settings}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=list(callbacks), **settings,
    )  # fmt: skip
    trainer.fit(Module(), data)


def test_lightning_monitors_the_metric(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger
    from nopad.trainer.with_lightning import EvalCallback, PackedCallback, PackedDataModule

    data = PackedDataModule(tiny_run.dataset(epochs=None))
    best = ModelCheckpoint(tmp_path, "{step}", "eval/acc", mode="max", every_n_train_steps=2)
    evaluation = EvalCallback(GenerationEval(scores(0.1, 0.5, 0.2), every=2))
    settings = {"max_steps": 6, "log_every_n_steps": 1, "enable_checkpointing": True}
    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, data, PackedCallback(data), best, evaluation, logger=logger, **settings)
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
    source = GenerationEval(scores(0.1, 0.5, 0.2), every=2, monitor="acc")
    told = GenerationEval(echo, EXAMPLES, {"exact": equal}, every=4, name="echo")
    evaluations = AccelerateEval(accelerator, model, source, told)
    found = {step: evaluations.after_step(step, last=step == 5) for step in range(1, 6)}
    assert {step: [r.is_best for r in reports] for step, reports in found.items()} == {
        1: [], 2: [True], 3: [], 4: [True, False], 5: [False, False],
    }  # fmt: skip
    accelerator.end_training()
    assert any(path.stat().st_size > 500 for path in tmp_path.rglob("events*"))


@pytest.mark.parametrize("front_end", ["hf", "lightning", "accelerate"])
def test_an_evaluation_pauses_the_meter(front_end, tmp_path):
    depths = []

    def harness(deadline=None):
        depths.append(meter()._pause_depth)
        return {}

    evaluation = GenerationEval(harness, every=1)
    evaluation.budget._start = created = evaluation.budget._start - 1000  # long before the training
    data = tiny_run.dataset(epochs=None)
    if front_end == "hf":
        from nopad.trainer.with_hf import EvalCallback, PackedTrainer
        from transformers import TrainingArguments

        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments(str(tmp_path), max_steps=1, **quiet)
        trainer = PackedTrainer(tiny_run.model(), args, None, data)
        trainer.add_callback(EvalCallback(trainer, evaluation))
        meter = lambda: trainer.meter  # noqa: E731
        trainer.train()
    elif front_end == "lightning":
        from nopad.trainer.with_lightning import EvalCallback, PackedCallback, PackedDataModule

        packs = PackedDataModule(data)
        callback = PackedCallback(packs)
        meter = lambda: callback.meter  # noqa: E731
        fit(tmp_path, packs, callback, EvalCallback(evaluation))
    else:
        from accelerate import Accelerator
        from nopad.trainer.with_accelerate import AccelerateEval

        own = ThroughputMeter()
        meter = lambda: own  # noqa: E731
        AccelerateEval(Accelerator(cpu=True), None, evaluation, meter=own).after_step(1)
    assert depths == [1]
    assert evaluation.budget._start - created >= 1000
