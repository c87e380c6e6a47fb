"""Recipes as a user runs them: real processes, real signals, torn checkpoints, YAML."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["--budget", "128", "--steps", "6", "--save-every", "2"]


def documents(folder: Path) -> Path:
    """Chat-like token ids, so that no tokenizer has to be loaded."""
    path = folder / "ids.jsonl"
    rows = [{"input_ids": [(7 * i + j) % 97 + 1 for j in range(5 + i % 40)]} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(recipe: str, *arguments, folder: Path, world: int = 1) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        if world > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(RECIPES / recipe), *map(str, arguments)]
        log = (folder / f"log-{recipe}-{rank}").open("w")
        children.append(
            subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        )
    return children


def finish(children: list[subprocess.Popen], folder: Path, status: int = 0) -> None:
    for child in children:
        code = child.wait(timeout=180)
        logs = "".join(path.read_text()[-2000:] for path in folder.glob("log-*"))
        assert code == status, logs


def weights(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def wait_for(path: Path, children: list[subprocess.Popen], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until and all(c.poll() is None for c in children), path
        time.sleep(0.02)


def stop_and_go_on(tmp_path: Path, common: list) -> None:
    """Signal one of two ranks, tear the newest data state, resume."""
    children = start("train_hf.py", *common, "--output", "parts", folder=tmp_path, world=2)
    wait_for(tmp_path / "parts" / "checkpoint-2", children)
    children[1].send_signal(signal.SIGTERM)
    finish(children, tmp_path)
    steps = [int(path.name[11:]) for path in (tmp_path / "parts").glob("checkpoint-*")]
    assert not (tmp_path / "parts" / "model.safetensors").exists() or max(steps) == 6
    newest = tmp_path / "parts" / f"checkpoint-{max(steps)}" / "nopad_data.json"
    newest.write_bytes(newest.read_bytes()[:-9])  # torn: the one before it must serve
    finish(
        start("train_hf.py", *common, "--output", "parts", "--resume", folder=tmp_path, world=2),
        tmp_path,
    )


def settings(tmp_path: Path) -> list:
    model, tokenizer = _model(tmp_path), _tokenizer(tmp_path)
    return ["--data", documents(tmp_path), "--model", model, "--tokenizer", tokenizer, *SMALL]


def test_a_signal_on_one_rank_stops_both_and_a_torn_checkpoint_is_passed_over(tmp_path):
    stop_and_go_on(tmp_path, settings(tmp_path))
    assert "done: parts, step 6" in (tmp_path / "log-train_hf.py-0").read_text()


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_weights_of_an_uninterrupted_one(tmp_path):
    common = settings(tmp_path)
    finish(start("train_hf.py", *common, "--output", "whole", folder=tmp_path, world=2), tmp_path)
    stop_and_go_on(tmp_path, common)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def _model(folder: Path) -> Path:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = folder / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    return path


def _tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(100)} | {"<unk>": 100, "<eos>": 101}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def test_fine_tuning_with_adapters_learns_from_answers_only(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(_model(tmp_path))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer = _tokenizer(tmp_path)
    chat = [
        {"messages": [
            {"role": "user", "content": f"w{i % 90} w{i % 7}"},
            {"role": "assistant", "content": f"w{i % 7} w{i % 5}"},
        ]}
        for i in range(80)
    ]  # fmt: skip
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat))
    (tmp_path / "sft.yaml").write_text(
        f"model: {tmp_path / 'base'}\ndata: {data}\ntokenizer: {tokenizer}\nbudget: 64\n"
        "learning-rate: 0.01\nlora: 4\noutput: out\nlog_every: 1\n"
    )
    finish(start("sft.py", "--config", "sft.yaml", folder=tmp_path), tmp_path)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "done: out" in (tmp_path / "log-sft.py-0").read_text()


def test_an_unknown_name_in_the_yaml_is_named(tmp_path):
    (tmp_path / "sft.yaml").write_text("learning_rat: 1\n")
    finish(start("sft.py", "--config", "sft.yaml", folder=tmp_path), tmp_path, status=2)
    assert "no settings learning_rat" in (tmp_path / "log-sft.py-0").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("delay", [0.0, 0.3, 0.9])
def test_a_signal_at_any_time_leaves_a_checkpoint_that_goes_on(tmp_path, number, delay):
    common = ["--data", documents(tmp_path), "--model", _model(tmp_path), *SMALL]
    common += ["--tokenizer", _tokenizer(tmp_path), "--output", "out", "--steps", "40"]
    children = start("train_hf.py", *common, folder=tmp_path)
    wait_for_line(tmp_path / "log-train_hf.py-0", "packs of 128", children)
    time.sleep(delay)
    children[0].send_signal(number)
    finish(children, tmp_path)
    finish(start("train_hf.py", *common, "--resume", folder=tmp_path), tmp_path)
    assert "done: out, step 40" in (tmp_path / "log-train_hf.py-0").read_text()


def wait_for_line(log: Path, text: str, children: list[subprocess.Popen]) -> None:
    until = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < until and all(c.poll() is None for c in children), text
        time.sleep(0.02)


@pytest.mark.slow
def test_lightning_stops_on_a_signal_and_goes_on(tmp_path):
    common = ["--data", documents(tmp_path), "--model", _model(tmp_path), *SMALL]
    common += ["--tokenizer", _tokenizer(tmp_path), "--accelerator", "cpu", "--steps", "40"]
    children = start("pretrain_lightning.py", *common, "--output", "out", folder=tmp_path)
    wait_for(tmp_path / "out", children)
    time.sleep(1)
    children[0].send_signal(signal.SIGTERM)
    finish(children, tmp_path)
    resume = ["--output", "out", "--resume", "out/last.ckpt"]
    finish(start("pretrain_lightning.py", *common, *resume, folder=tmp_path), tmp_path)
    assert "done: 40 steps" in (tmp_path / "log-pretrain_lightning.py-0").read_text()
