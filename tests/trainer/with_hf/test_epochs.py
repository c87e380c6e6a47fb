"""Epochs in the HF Trainer: what they do, their steps, and trainings after the first."""

from __future__ import annotations

import pytest
import tiny_run
from echo_eval import EXAMPLES, echo, equal
from hf_child import trainer
from nopad.packing import PackedDataset
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.with_hf import EvalCallback
from trained_packs import tokens_of, trained
from transformers import TrainerCallback


class Notes(TrainerCallback):
    """Notes the steps of evaluations and saves, and the epochs."""

    def __init__(self):
        self.evaluations, self.saves, self.begun, self.ended, self.at_steps = [], [], [], [], []

    def on_evaluate(self, args, state, control, **_):
        self.evaluations.append(state.global_step)

    def on_save(self, args, state, control, **_):
        self.saves.append(state.global_step)

    def on_epoch_begin(self, args, state, control, **_):
        self.begun.append(state.global_step)

    def on_epoch_end(self, args, state, control, **_):
        self.ended.append((state.global_step, state.epoch))

    def on_step_end(self, args, state, control, **_):
        self.at_steps.append(state.epoch)


HELD_OUT = {"eval_dataset": tiny_run.samples(2)}
BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        ({"num_train_epochs": 3}, {}),
        ({"max_steps": 12}, {}),  # a pass after the other
        ({"max_steps": 12}, {"epochs": 2}),
    ],
)
def test_evaluations_saves_and_logs_by_epoch_come_after_every_epoch(settings, data, tmp_path):
    notes = Notes()
    run, watch = trainer(tmp_path, tiny_run.dataset(9, **data), 1, HELD_OUT, **settings | BY_EPOCH)
    run.add_callback(notes)
    run.train()
    packs = run.train_dataset.count()
    assert packs == run.train_dataset.count(1) == run.train_dataset.count(2) == 4
    assert notes.evaluations == notes.saves == [4, 8, 12]
    assert notes.begun == [0, 4, 8] and notes.ended == [(4, 1.0), (8, 2.0), (12, 3.0)]
    assert len(watch.losses) == 3 and notes.at_steps == [step / 4 for step in range(1, 13)]


def test_an_epoch_that_ends_within_a_step_ends_after_it(tmp_path):
    notes = Notes()
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 3, HELD_OUT, num_train_epochs=2.5, **BY_EPOCH)
    run.add_callback(notes)
    run.train()
    assert notes.ended == [(2, 1.5), (3, 2.25), (4, 3.0)]  # of 12 packs, 10 are asked for
    assert notes.evaluations == notes.saves == [2, 3, 4]


def test_a_run_that_is_resumed_evaluates_after_the_epochs_that_are_left(tmp_path):
    notes = Notes()
    for checkpoint in (None, tmp_path / "checkpoint-5"):
        saves = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"}
        run, _ = trainer(tmp_path, tiny_run.dataset(9), 1, HELD_OUT, num_train_epochs=3, **saves)
        run.add_callback(notes)
        run.train(resume_from_checkpoint=checkpoint)
    assert notes.evaluations == [4, 8, 12, 8, 12]


def test_the_epoch_of_a_stream_goes_on_after_a_resume(tmp_path):
    """A stream has no known length: its epoch is the fraction of the steps to train."""
    at_steps = []
    for checkpoint in (None, tmp_path / "checkpoint-3"):
        notes = Notes()
        data = PackedDataset(lambda: iter(tiny_run.samples(9)), budget=32, epochs=None)
        saves = {"save_strategy": "steps", "save_steps": 3}
        run, _ = trainer(tmp_path, data, 1, max_steps=6, **saves)
        run.add_callback(notes)
        run.train(resume_from_checkpoint=checkpoint)
        assert run.state.log_history[-1]["epoch"] == 1
        at_steps.append(notes.at_steps)
    assert at_steps[0] == [step / 6 for step in range(1, 7)] and at_steps[1] == at_steps[0][3:]


def test_a_stream_ends_the_training_with_its_epochs(tmp_path, capsys):
    rows, notes = [{"input_ids": row["input_ids"]} for row in tiny_run.samples(9)], Notes()
    stream = {"budget": 32, "shards": 1, "epochs": 2, "pretokenize": False}
    packs = len(list(PackedDataset(lambda: iter(rows), **stream)))
    evaluation = GenerationEval(echo, EXAMPLES, {"equal": equal}, every=1000)
    settings = {"max_steps": 50, "save_strategy": "steps", "save_steps": 1000}
    run, _ = trainer(tmp_path, PackedDataset(lambda: iter(rows), **stream), 1, **settings)
    run.add_callback(EvalCallback(run, evaluation))
    run.add_callback(notes)
    assert len(trained(run)) == packs == run.state.global_step == run.state.max_steps < 50
    logged = [set(entry) for entry in run.state.log_history]
    assert "train_runtime" in logged[-1] and "eval_equal" in logged[-3], "the last evaluation"
    assert notes.saves == [packs] and notes.at_steps[-1] == 1
    out = capsys.readouterr().out
    assert f"the stream is over: training ends at step {packs}, not 50" in out
    assert "not read to its end" not in out
    assert len(trained(run)) == packs, "another training reads the next pass"
    again, _ = trainer(tmp_path, PackedDataset(lambda: iter(rows), **stream), 1, **settings)
    assert trained(again, resume_from_checkpoint=True) == [], "a run that has ended, resumed"
    plain, _ = trainer(tmp_path, lambda: iter(rows), 1, {"budget": 32}, max_steps=packs)
    assert len(trained(plain)) == packs


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_that_max_steps_ends_says_so_and_reports_its_packs(tmp_path, accumulation, capsys):
    """The loader has read another step by then."""
    rows = [{"input_ids": row["input_ids"]} for row in tiny_run.samples(14)]
    data = PackedDataset(lambda: iter(rows), budget=32, shards=2)
    run, _ = trainer(tmp_path, data, accumulation, max_steps=2)
    packs, report = trained(run), data.report()
    assert report["packs"] == len(packs) == 2 * accumulation
    assert report["packed_tokens"] == sum(map(len, packs))
    said = f"not read to its end: max_steps=2 ended the training after {len(packs)} packs"
    assert capsys.readouterr().out.count(said) == 1


class StopEpoch(TrainerCallback):
    """Ends an epoch after given steps, or inside the first."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step in self.steps

    def on_substep_end(self, args, state, control, **_):
        control.should_epoch_stop = not self.steps


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("length", [{"num_train_epochs": 3}, {"max_steps": 9}])
def test_an_epoch_that_a_callback_stops_is_left_and_the_next_one_follows(length, workers, tmp_path):
    epochs = tokens_of(tiny_run.dataset(9, epochs=4), 16)  # of 4 packs each
    settings, notes = {**length, **BY_EPOCH, "dataloader_num_workers": workers}, Notes()
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 1, HELD_OUT, **settings)
    run.add_callback(StopEpoch(1, 5))  # the fifth step ends its epoch anyway
    run.add_callback(notes)
    assert trained(run) == epochs[:1] + epochs[4:12]
    assert run.state.global_step == run.state.max_steps == 9
    assert notes.evaluations == notes.saves == [1, 5, 9]
    resumed, _ = trainer(tmp_path, tiny_run.dataset(9), 1, HELD_OUT, **length)
    assert trained(resumed, resume_from_checkpoint=tmp_path / "checkpoint-1") == epochs[4:12]


def test_stopping_the_last_epoch_ends_the_training(tmp_path):
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 1, num_train_epochs=2)
    run.add_callback(StopEpoch(5))
    assert len(trained(run)) == run.state.global_step == 5
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 2, num_train_epochs=2)
    run.add_callback(StopEpoch())
    with pytest.raises(ValueError, match="set inside an optimizer step"):
        run.train()
    stream = PackedDataset(lambda: iter(tiny_run.samples(9)), budget=32, epochs=None)
    run, _ = trainer(tmp_path, stream, 1, max_steps=3)
    run.add_callback(StopEpoch(1))
    with pytest.raises(ValueError, match="the epochs of a stream have no known end"):
        run.train()


def test_steps_are_counted_with_the_arguments_of_each_trial(tmp_path, monkeypatch):
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 1, num_train_epochs=1)
    trials = [
        ({"num_train_epochs": 2}, 8, 8),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 2}, 2, 4),
        ({"max_steps": 2, "gradient_accumulation_steps": 1}, 2, 2),
        ({"max_steps": -1}, 4, 4),
    ]
    for arguments, steps, packs in trials:

        def set_up(trial, arguments=arguments):  # a real trial needs a library
            for name, value in arguments.items():
                setattr(run.args, name, value)

        monkeypatch.setattr(run, "_hp_search_setup", set_up)
        run.train_dataset.rewind()
        run._loader = None
        seen = trained(run)
        assert (run.state.global_step, run.args.max_steps, len(seen)) == (steps, steps, packs)
        assert seen == tokens_of(tiny_run.dataset(9, epochs=2), packs)


def test_steps_are_counted_with_the_accumulation_of_the_accelerator(tmp_path):
    setting = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    run, _ = trainer(
        tmp_path, tiny_run.dataset(9), 1, num_train_epochs=1, accelerator_config=setting
    )
    assert trained(run) == tokens_of(tiny_run.dataset(9), 4) and run.state.global_step == 2


def test_a_second_training_is_resumed_where_it_was(tmp_path):
    saves = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}
    run, _ = trainer(tmp_path, tiny_run.dataset(9), 1, **saves)
    run.train()
    second = trained(run)
    resumed, _ = trainer(tmp_path, tiny_run.dataset(9), 1, **saves)
    folder = tmp_path / "checkpoint-3"
    assert trained(resumed, resume_from_checkpoint=folder) == second[3:]
    assert resumed.state.global_step == 4
    for one, other in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
        assert one.equal(other)


def test_after_an_error_the_next_training_begins_with_the_step_that_failed(tmp_path):
    class Fail(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                raise RuntimeError("interrupted")

    run, _ = trainer(tmp_path, tiny_run.dataset(9, epochs=None), 2, max_steps=3)
    run.add_callback(Fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        run.train()
    run.remove_callback(Fail)
    assert trained(run) == tokens_of(tiny_run.dataset(9, epochs=None), 10)[4:]


def test_data_without_packs_is_refused(tmp_path):
    data = PackedDataset([[1] * 9], budget=8, overflow="drop")
    with pytest.raises(ValueError, match=r"^the data has no packs"):
        trainer(tmp_path, data, 1, num_train_epochs=1)


def test_metrics_by_batch_are_computed_with_the_last_one(tmp_path):
    seen = []

    def metrics(prediction, compute_result):
        seen.append(prediction.predictions.shape[-1])
        return {"batches": len(seen)} if compute_result else {}

    by_batch = {"max_steps": 1, "batch_eval_metrics": True}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, **by_batch)
    run.compute_metrics = metrics  # set late, so that the logits are wanted from then on
    assert run.evaluate(tiny_run.samples(9))["eval_batches"] == 4
    assert seen == [tiny_run.VOCABULARY] * 4
