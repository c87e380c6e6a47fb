"""train_hf, sft and pretrain_lightning as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import small_inputs
import torch
import warm_python
from nopad.trainer.graceful_stop import STOP_SIGNALS
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES = Path(__file__).parents[2] / "recipes"


def small_args(folder: Path) -> list:
    args = ["--data", small_inputs.documents(folder), small_inputs.model(folder)]
    return [*args, "--tokenizer", small_inputs.tokenizer(folder), "--budget", "64"]


def test_fine_tuning_with_adapters_learns_from_answers_only(tmp_path):
    base = Path(small_inputs.checkpoint(tmp_path))
    (tmp_path / "sft.yaml").write_text(
        f"model: {base.relative_to(tmp_path)}\ndata: {small_inputs.chats(tmp_path)}\n"
        f"tokenizer: {small_inputs.tokenizer(tmp_path)}\nbudget: 64\n"
        "learning-rate: 0.01\nlora: 4\noutput: out\nlog_every: 1\n"
    )
    done = warm_python.run(
        [RECIPES / "sft.py", "--config", "sft.yaml"],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base), "found from other folders, too"
    assert "done: out" in done.stdout
    assert re.search(r"LoRA of rank 4: trains [\d,]+ of [\d,]+ parameters", done.stdout)


@pytest.mark.parametrize("recipe", ["train_hf", "pretrain_lightning"])
def test_a_run_is_neither_written_over_nor_resumed_as_another(
    recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    inputs = small_args(tmp_path)
    small_inputs.train(recipe, [*inputs, "--steps", "2", "--save-every", "1"])
    run = tmp_path / "runs" / f"{recipe}-1"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"{recipe}-1 contains a run already"):
        small_inputs.train(recipe, [*inputs, "--steps", "2", "--output", run])
    for other in (["--steps", "4"], ["--learning-rate", "0.5"]):
        with pytest.raises(ValueError, match=f"{recipe}-1 was started with .*{other[0][2:5]}"):
            small_inputs.train(recipe, ["--resume", *other])
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    small_inputs.train(recipe, ["--resume"])
    assert f"done: runs/{recipe}-1, step 2" in capsys.readouterr().out
    for path in run.glob("*.safetensors"):
        assert path.read_bytes() == before[path], "a finished run took another step"


@pytest.mark.parametrize("recipe", ["train_hf", "pretrain_lightning"])
def test_a_run_that_fails_gives_the_signals_back(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    monkeypatch.setattr(f"nopad.recipes.{recipe}.load_model", lambda *_, **__: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            small_inputs.status(recipe, [*small_args(tmp_path), "--steps", "1"])
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_torn_last_checkpoint_is_resumed_from_the_one_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    inputs = [*small_args(tmp_path), "--accelerator", "cpu", "--steps", "3", "--save-every", "2"]
    small_inputs.train("pretrain_lightning", inputs)
    last = tmp_path / "runs" / "pretrain_lightning-1" / "last.ckpt"
    wanted = torch.load(last, weights_only=True)["state_dict"]
    last.write_bytes(last.read_bytes()[:5000])
    small_inputs.train("pretrain_lightning", ["--resume"])
    out = capsys.readouterr().out
    assert "step=2.ckpt, step 2; " in out and "done: runs/pretrain_lightning-1, step 3" in out
    found = torch.load(last, weights_only=True)["state_dict"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model = AutoModelForCausalLM.from_pretrained(last.parent / "model")
    assert all(torch.equal(w, wanted[f"model.{name}"]) for name, w in model.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(last.parent / "model"))


def test_a_signal_during_the_start_stops_the_run_after_a_step(tmp_path, monkeypatch, capsys):
    from nopad.trainer import with_hf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    callback = with_hf.StopCallback

    def signalled():
        os.kill(os.getpid(), signal.SIGUSR1)
        return callback()

    monkeypatch.setattr(with_hf, "StopCallback", signalled)
    small_inputs.status(
        "train_hf", [*small_args(tmp_path), "--steps", "5", "--output", "my runs/a"]
    )
    out, command = capsys.readouterr().out, "continue with: nopad train-hf --resume 'my runs/a'"
    assert f"after a stop, {command}\n" in out
    assert f"stopped: my runs/a, step 1; {command}\n" in out
    monkeypatch.setattr(with_hf, "StopCallback", callback)
    small_inputs.train("train_hf", ["--resume", "my runs/a"])
    assert "done: my runs/a, step 5" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["pretrain", "train_hf", "pretrain_lightning"])
def test_text_for_a_tokenizer_without_an_end_token_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = small_inputs.tokenizer(tmp_path, eos=None)
    common = ["--data", small_inputs.texts(tmp_path), small_inputs.model(tmp_path)]
    with pytest.raises(ValueError, match="no eos token to end documents with"):
        small_inputs.train(recipe, [*common, "--tokenizer", tokenizer, "--output", "out"])
    assert not (tmp_path / "out").exists()


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [small_inputs.checkpoint(tmp_path, vocab_size=90), "--output", "o"]
    argv += ["--data", small_inputs.chats(tmp_path), "--budget", "64"]
    with pytest.raises(ValueError, match="token 101 is outside the model's vocabulary of 90"):
        small_inputs.train("sft", [*argv, "--tokenizer", small_inputs.tokenizer(tmp_path)])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_every_precision_is_taken_without_a_gpu(precision, tmp_path):
    from nopad.recipes.train_hf import parse_args, training_arguments

    args = parse_args(["--precision", precision, "--output", str(tmp_path)])
    assert training_arguments(args).device.type == "cpu"


def test_a_model_that_is_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read at import
    with pytest.raises((ValueError, OSError), match="no/where"):
        small_inputs.train("train_hf", ["no/where", "--steps", "1"])
