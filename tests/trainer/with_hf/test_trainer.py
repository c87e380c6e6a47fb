"""The HF Trainer, on one and two ranks: exact gradients, equal curves, resumed ≡ uninterrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from nopad.collators import PaddedCollator
from nopad.packing import PackedDataset
from transformers import (
    DefaultDataCollator,
    LlamaForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)
from trl_run import trl_trainer

CHILD = Path(__file__).parents[1] / "support" / "hf_child.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return tiny_run.launch(CHILD, tmp_path_factory.mktemp("one"), 1, world=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return tiny_run.launch(CHILD, tmp_path_factory.mktemp("two"), 2, world=2)


def test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one(one, two):
    for child in (*one, *two):
        assert len(child["gradients"]) == (9 if child is one[0] else 8)
        for name, distance in child["gradients"].items():
            assert distance < 2e-6, name


def test_resumed_equals_uninterrupted_to_the_bit(one, two):
    for child in (*one, *two):
        assert child["resumed"]["parts"][1] == child["resumed"]["whole"][1]
    assert one[0]["resumed"]["parts"] == one[0]["resumed"]["whole"]


def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(one, two):
    assert np.allclose(one[0]["curve"], two[0]["curve"], rtol=1e-5)


def test_tokens_seen_are_the_sum_over_ranks(one, two):
    tokens = 2 * tiny_run.dataset(19).report()["packed_tokens"]
    assert [rank["totals"] for rank in (*one, *two)] == [[tokens] * 2] * 3


def test_epochs_end_after_the_same_step_on_all_ranks(one, two):
    assert two[0]["ends"][0] == two[1]["ends"][0] == -(-one[0]["ends"][0] // 2)


def test_the_evaluation_loss_is_the_token_mean(one, two):
    for child in (*one, *two):
        for name, (got, wanted) in child["evaluated"].items():
            assert abs(got - wanted) < 1e-5 * wanted, name


def test_predictions_are_the_logits_of_the_set(tmp_path):
    from hf_child import trainer

    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1)
    data = tiny_run.dataset(23)
    wanted = run.evaluate(data)["eval_loss"]
    told = run.predict(data)
    assert told.metrics["test_loss"] == pytest.approx(wanted, rel=1e-6)
    data.rewind()
    for pack, logits, labels in zip(data, told.predictions, told.label_ids, strict=True):
        batch = tiny_run.collate(pack)
        del batch["labels"]
        gold = run.model(**batch).logits[0].detach().numpy()
        assert np.allclose(logits[: len(gold)], gold, atol=1e-5)
        assert labels[: len(gold)].tolist() == pack.labels.tolist()
    assert run.attached_loss.fused
    run.args.prediction_loss_only = True
    assert run.predict(data).predictions is None


def test_metrics_have_the_logits_of_evaluations_and_training_does_without(tmp_path):
    from hf_child import trainer

    def metrics(predictions):
        return {"width": predictions.predictions.shape[-1]}

    more = {"compute_metrics": metrics, "eval_dataset": tiny_run.dataset(23)}
    often = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, more, **often)
    in_training, step = [], run.training_step
    run.training_step = lambda *args: in_training.append(run.attached_loss.fused) or step(*args)
    run.train()
    assert in_training == [True, True]
    widths = [line["eval_width"] for line in run.state.log_history if "eval_width" in line]
    assert widths == [tiny_run.VOCABULARY] * 2


@pytest.mark.parametrize("named", [False, True])
def test_every_evaluation_of_a_run_is_of_the_whole_set(tmp_path, monkeypatch, named):
    from hf_child import trainer

    often = {"learning_rate": 0.0, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    data, passes = tiny_run.dataset(23), []
    stock = data.reader.read

    def read(*where):
        passes.append(where)
        return stock(*where)

    monkeypatch.setattr(data.reader, "read", read)
    evaluated = {"eval_dataset": {"held": data} if named else data}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, more=evaluated, **often)
    run.train()
    name = "eval_held_loss" if named else "eval_loss"
    first, second = (line[name] for line in run.state.log_history if name in line)
    assert first == second > 0
    assert len(passes) == 3  # once to count


def test_older_checkpoints_go_once_the_new_one_is_complete(tmp_path, monkeypatch):
    from hf_child import trainer
    from nopad.trainer.with_hf import intact_checkpoints as module

    manifests: list[list[str]] = []
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, **settings)
    write, save = module.write_manifest, module.Trainer._save_checkpoint

    def write_and_note(folder):
        manifests.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        write(folder)

    monkeypatch.setattr(module, "write_manifest", write_and_note)
    run.train()
    assert manifests == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert run.args.save_total_limit == 1

    def save_without_manifest(self, *args):
        assert not (tmp_path / "checkpoint-2" / "nopad_manifest.json").exists()
        save(self, *args)

    monkeypatch.setattr(module.Trainer, "_save_checkpoint", save_without_manifest)
    run._save_checkpoint(run.model, None)
    assert module.latest_intact_checkpoint(tmp_path).name == "checkpoint-2"


def test_epochs_may_end_in_the_middle(tmp_path):
    from hf_child import trainer

    data = tiny_run.dataset()
    first, second = data.count(0), data.count(1)
    run, _ = trainer(tmp_path, data, 1, num_train_epochs=1.5)
    metrics = run.train().metrics
    assert run.state.global_step == -(-(first + second / 2) // 1)
    *steps, end = run.state.log_history
    epochs = [
        (n + 1) / first if n < first else 1 + (n + 1 - first) / second for n in range(len(steps))
    ]
    assert [round(line["epoch"], 6) for line in steps] == [round(epoch, 6) for epoch in epochs]
    assert end["epoch"] == steps[-1]["epoch"]
    seen = steps[-1]["pack/samples_seen"]
    assert metrics["train_samples_per_second"] == pytest.approx(
        seen / end["train_runtime"], rel=0.01
    )
    with pytest.raises(ValueError, match="num_train_epochs=0"):
        trainer(tmp_path, tiny_run.dataset(), 1, num_train_epochs=0)


def test_arguments_serve_a_second_trainer_with_other_data(tmp_path):
    from nopad.trainer.with_hf import PackedTrainer

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, num_train_epochs=1, **quiet)
    before = dict(vars(args))
    for count in (40, 10):
        data = tiny_run.dataset(count)
        run = PackedTrainer(tiny_run.model(), args, None, data)
        assert run.args.max_steps == data.count()
        assert run.attached_loss.options["label_smoothing"] == 0.1
    assert vars(args) == before


def test_what_packs_cannot_do_is_refused_with_the_way_out(tmp_path):
    from hf_child import trainer

    stream = PackedDataset(lambda: iter([[1, 2, 3]]), budget=32, pretokenize=False)
    with pytest.raises(ValueError, match=r"packs of a stream cannot be counted.*pass max_steps="):
        trainer(tmp_path, stream, 1, num_train_epochs=1)
    with pytest.raises(ValueError, match=r"auto_find_batch_size=True.*lower the data's budget"):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, auto_find_batch_size=True)


@pytest.mark.parametrize(
    ("collator", "told"),
    [
        (PaddedCollator(), r"^PaddedCollator cannot collate a pack .*: pass a PackedCollator"),
        (DefaultDataCollator(), r"^DefaultDataCollator cannot collate a pack"),
        (lambda pack: {"input_ids": pack.tokens}, "returns a batch without labels"),
    ],
)
def test_a_collator_that_is_not_for_packs_is_refused_at_once(collator, told, tmp_path):
    from hf_child import trainer

    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, tiny_run.dataset(), 1, collator=collator, max_steps=1)


def test_a_classifier_without_a_padding_token_is_refused_at_once(tmp_path):
    from nopad.trainer.with_hf import PackedTrainer

    model = LlamaForSequenceClassification(tiny_run.model().config)
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"^LlamaForSequenceClassification finds the last token"):
        PackedTrainer(model, args, None, tiny_run.dataset())


class Signal(TrainerCallback):
    """Sends one at the end of a step, or leaves by an error."""

    def __init__(self):
        self.at, self.broken = 1, False

    def on_step_end(self, args, state, control, **_):
        if self.broken:
            raise KeyError("broken")
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def unheard():
    """A signal that nobody hears would end the tests."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_stop_callback_serves_one_training_after_another(tmp_path, unheard):
    from hf_child import trainer
    from nopad.trainer.with_hf import StopCallback

    sender = Signal()
    run, _ = trainer(tmp_path, tiny_run.dataset(epochs=None), 1, max_steps=4)
    run.add_callback(sender)
    run.add_callback(StopCallback())
    for asked_at, ended_at in ((1, 1), (9, 4), (2, 2)):
        sender.at = asked_at
        run.train()
        assert run.state.global_step == ended_at
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    sender.broken = True
    with pytest.raises(KeyError, match="broken"):
        run.train()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_trl_s_sft_trainer_asks_for_its_own_arguments(tmp_path):
    sft = pytest.importorskip("trl", reason="the trainer is TRL's")
    from nopad.trainer.with_hf import PackedTrainerMixin

    class PackedSFTTrainer(PackedTrainerMixin, sft.SFTTrainer):
        pass

    for args in (None, TrainingArguments(str(tmp_path), max_steps=1)):
        with pytest.raises(ValueError, match=r"TrainingArguments.*pass an SFTConfig"):
            PackedSFTTrainer(tiny_run.model(), args, None, tiny_run.dataset())


@pytest.mark.smoke("packed ≡ one by one", "TRL")
def test_trl_s_sft_trainer_takes_packs_and_is_exact(tmp_path):
    from hf_child import Watch

    model, watch = tiny_run.model(), Watch()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    trl_trainer(tmp_path, model, tiny_run.dataset(), {"callbacks": [watch]}).train()
    assert tiny_run.distance(watch.gradient, gold) < 2e-6


@pytest.mark.parametrize("named", [False, True])
def test_trl_s_sft_trainer_evaluates_packs(named, tmp_path):
    from hf_child import trainer

    stock, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1)
    wanted, data = stock.evaluate(tiny_run.dataset(23))["eval_loss"], tiny_run.dataset(23)
    more = {"eval_dataset": {"held": data} if named else data}
    often = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(), more, **often)
    run.train()
    name = "eval_held_loss" if named else "eval_loss"
    told = next(line[name] for line in run.state.log_history if name in line)
    assert told == pytest.approx(wanted, rel=1e-6)
    assert run.evaluate(tiny_run.dataset(23))["eval_loss"] == pytest.approx(wanted, rel=1e-6)


def test_a_loss_of_trl_s_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"loss_type='dft'.*'nll'"):
        trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(), loss_type="dft")


def test_a_checkpoint_of_the_stock_trainer_continues_with_its_optimizer(tmp_path):
    from nopad.trainer.with_hf import PackedTrainer
    from transformers import AutoModelForCausalLM, Trainer

    rows = [{"input_ids": list(range(1, 20)), "labels": list(range(1, 20))}] * 4
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2}
    Trainer(tiny_run.model("sdpa"), TrainingArguments(str(tmp_path), **quiet), None, rows).train()
    folder = tmp_path / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="nopad")
    args = TrainingArguments(str(tmp_path / "packed"), **quiet, save_strategy="no")
    run = PackedTrainer(model, args, None, tiny_run.dataset())
    with pytest.raises(ValueError, match="start from its weights and its optimizer"):
        run.train(resume_from_checkpoint=folder)
    run = PackedTrainer(model, args, None, tiny_run.dataset())
    run.create_optimizer()
    saved = torch.load(folder / "optimizer.pt")
    run.optimizer.load_state_dict(saved)
    moments = float(saved["state"][0]["exp_avg"].sum())  # before the training changes them
    first: list[float] = []
    run.add_callback(SeesMoments(first))
    run.train()
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {4.0}
    assert first == [moments]


class SeesMoments(TrainerCallback):
    """Notes the first moments that the first step begins with."""

    def __init__(self, seen):
        self.seen = seen

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
        if state.global_step == 0:
            parameter = optimizer.param_groups[0]["params"][0]
            self.seen.append(float(optimizer.state[parameter]["exp_avg"].sum()))
