"""Names in trackers, short lines on the terminal, and TRL's own metrics."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from echo_eval import EXAMPLES, echo, equal
from hf_child import trainer
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.with_hf import EvalCallback, PackedTrainer
from transformers import ProgressCallback, TrainingArguments
from trl_run import trl_trainer


class Scalars:
    """A TensorBoard writer that notes names."""

    def __init__(self):
        self.names: set[str] = set()

    def add_scalar(self, name, value, step):
        self.names.add(name)

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_trackers_have_the_names_of_all_front_ends(tmp_path, capsys):
    from transformers.integrations import TensorBoardCallback

    scalars = Scalars()
    more = {"eval_dataset": tiny_run.dataset(9)}
    often = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, more, **often)
    run.add_callback(TensorBoardCallback(scalars))
    run.train()
    assert {"train/loss", "pack/fill", "pack/tokens_seen", "eval/loss"} <= scalars.names
    assert not [name for name in scalars.names if "/pack" in name]
    line = next(line for line in capsys.readouterr().out.splitlines() if "pack/fill" in line)
    assert "tokens_per_second" in line and "tokens_seen" not in line and "padding" not in line
    assert "pack/tokens_seen" in run.state.log_history[0]


def test_the_progress_bar_s_lines_are_short_too(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    run = PackedTrainer(tiny_run.model(), args, None, tiny_run.dataset())
    (bar,) = [c for c in run.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    assert type(bar).__name__ == "ShortProgress"
    run.remove_callback(ProgressCallback)
    assert not [c for c in run.callback_handler.callbacks if isinstance(c, ProgressCallback)]


@pytest.mark.parametrize("printed", [True, False])
def test_the_metrics_of_an_evaluation_are_printed_once(tmp_path, capsys, printed):
    from transformers import PrinterCallback

    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1)
    if not printed:
        run.remove_callback(PrinterCallback)
    evaluation = GenerationEval(echo, EXAMPLES, {"same": equal}, every=1, num_samples=1)
    run.add_callback(EvalCallback(run, evaluation, console=True))
    run.train()
    out = capsys.readouterr().out
    assert out.count("same") == 1 and out.count("'a' -> 'a'") == 1
    assert ("after 1 steps:\n" in out) == printed


@pytest.mark.parametrize("keep", [False, True])
def test_trl_s_metrics_are_those_of_the_logits(tmp_path, keep):
    model = tiny_run.model()
    settings = {"logging_steps": 1, "learning_rate": 0.0, "gradient_accumulation_steps": 1}
    more = {"eval_dataset": tiny_run.dataset(9)}
    run = trl_trainer(tmp_path, model, tiny_run.dataset(), more, **settings)
    if keep:
        run.attached_loss.keep_logits()
    run.train()
    (pack,) = tiny_run.packs(tiny_run.dataset(), 1)
    batch = tiny_run.collate(pack)
    targets = batch.pop("labels")[0, 1:]
    model.nopad_loss.detach()
    logits = model(**batch).logits[0, :-1].detach()[targets != -100]
    targets = targets[targets != -100]
    log = run.state.log_history[0]
    accuracy = (logits.argmax(-1) == targets).float().mean()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert log["mean_token_accuracy"] == pytest.approx(float(accuracy), abs=1e-6)
    assert log["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert log["num_tokens"] == len(pack.tokens)


def test_trl_s_metrics_cost_nothing_between_logs_and_are_in_evaluations(tmp_path, monkeypatch):
    from nopad.trainer.loss import attached_loss

    measured, stock = [], attached_loss.token_statistics
    monkeypatch.setattr(
        attached_loss, "token_statistics", lambda *a: measured.append(1) or stock(*a)
    )
    settings = {"logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 1}
    run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(), **settings)
    run.train()
    assert len(measured) == 2
    assert {"eval_mean_token_accuracy", "eval_entropy"} <= eval_log(run, tiny_run.dataset(9)).keys()


def test_trl_s_train_metrics_stay_with_the_loss_of_their_step(tmp_path):
    settings = {"logging_steps": 2, "max_steps": 2, "gradient_accumulation_steps": 1}
    run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(), **settings)
    evaluation = GenerationEval(echo, EXAMPLES, {"same": equal}, every=2)
    run.add_callback(EvalCallback(run, evaluation))
    run.train()
    evaluated, trained, _ = run.state.log_history
    names = {"mean_token_accuracy", "entropy", "num_tokens"}
    assert "eval_same" in evaluated and not names & evaluated.keys()
    assert names | {"loss"} <= trained.keys()


def eval_log(run, data) -> dict:
    run.evaluate(data)
    return run.state.log_history[-1]
