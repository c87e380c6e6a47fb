"""The pretraining recipe as a user runs it: processes, exit codes, files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_inputs
import warm_python
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "pretrain.py")
SMALL = ["--budget", "128", "--save-every", "2", "--eval-every", "100"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A config so small that start-up takes nearly all the time."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.0,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    words = ["def", "class", "import", "return", "self", "for", "in", "range", "print"]
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(400):
            text = " ".join(generator.choices(words, k=generator.randint(1, 120)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, corpus) -> Path:
    """A tokenizer of the recipe's kind, saved for --tokenizer."""
    from nopad.recipes.support import stdlib_corpus

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    stdlib_corpus.train_tokenizer(texts).save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(model, corpus, tokenizer) -> list[str]:
    return [str(model / "config.json"), "--tokenizer", str(tokenizer),
            "--data", str(corpus), *SMALL]  # fmt: skip


def environment() -> dict[str, str]:
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return {**os.environ, "OMP_NUM_THREADS": "1", **cpu}


def run(*arguments: str, cwd: Path, launcher: tuple[str, ...] = ()):
    command = [*launcher, RECIPE, *arguments]
    return warm_python.run(command, cwd=cwd, env=environment(), timeout=300)


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def same_weights(a: Path, b: Path) -> bool:
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


def test_a_killed_run_resumes_to_the_same_losses_and_weights(tmp_path, arguments):
    done = run(*arguments, "--steps", "9", "--output", "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert [step for step, _ in losses(whole)] == list(range(1, 10))
    assert_summary(whole, done.stdout + done.stderr)

    child = warm_python.Popen(
        [RECIPE, *arguments, "--steps", "9", "--output", "killed"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(killed / f"checkpoint-{random.choice([2, 4])}", child)
    child.send_signal(signal.SIGKILL)
    assert child.wait(120) == -signal.SIGKILL
    assert not (killed / "checkpoint-9").exists()

    done = run("--resume", "killed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(killed) == losses(whole)
    assert_summary(killed, done.stdout + done.stderr)
    assert same_weights(killed / "checkpoint-9", whole / "checkpoint-9")


def assert_summary(folder: Path, output: str) -> None:
    """The end tells of the whole run, also of what was done before a resume."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    tokens = sum(line["tokens"] for line in lines)
    assert f"tokens trained  {tokens:,} of " in output and " samples in 9 steps" in output
    evaluations = (folder / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 9]
    assert "s in 2; matched " in output and (folder / "training.svg").is_file()


def wait_for(path: Path, child: warm_python.Popen) -> None:
    deadline = time.monotonic() + 250
    while not path.exists():
        assert child.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


COMMAND, MODULE = ("-m", "nopad", "pretrain"), ("-m", "nopad.recipes.pretrain")
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "1")


@pytest.mark.parametrize(
    "starts",
    [(COMMAND, MODULE),
     pytest.param(((*LAUNCH, RECIPE), (*LAUNCH, *COMMAND)), marks=pytest.mark.slow)],
)  # fmt: skip
def test_it_starts_as_a_script_and_as_a_command(tmp_path, arguments, starts):
    """The launcher starts a new Python."""
    for start in starts:
        command = [*start, *arguments, "--steps", "1"]
        done = warm_python.run(command, cwd=tmp_path, env=environment(), timeout=300)
        assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "runs").iterdir())
    assert [first.name, second.name] == ["pretrain-1", "pretrain-2"]
    assert losses(first) == losses(second)


@pytest.mark.slow  # fast on the loaders themselves: trainer/with_accelerate/test_loader.py
def test_two_ranks_train_like_one_rank_that_accumulates_twice(tmp_path, arguments):
    one = run(*arguments, "--steps", "4", "--accumulation", "2", "--output", "one", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    two = run(
        *arguments, "--steps", "4", "--output", "two", cwd=tmp_path,
        launcher=("-m", "accelerate.commands.launch", "--multi_gpu",
                  "--num_processes", "2"),
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert "2 x cpu" in two.stdout + two.stderr
    for (step, a), (other, b) in zip(
        losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True
    ):
        assert step == other and a == pytest.approx(b, rel=1e-5)


def test_the_checkpoint_is_a_model_that_transformers_loads(tmp_path, arguments):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run(*arguments, "--steps", "2", "--eval-every", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after 2 steps" in done.stdout + done.stderr
    folder = tmp_path / "runs" / "pretrain-1" / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    loaded = model.state_dict()
    assert all((loaded[name] == tensor).all() for name, tensor in stored.items())
    assert len(AutoTokenizer.from_pretrained(folder)) <= model.config.vocab_size


BAD = {
    "an unknown file type": (["--data", "corpus.xyz"], "corpus.xyz"),
    "a missing column": (["--text-column", "body"], "body"),
    "an empty corpus": (["--data", "empty.jsonl"], "nothing to pack"),
    "a budget below 2": (["--budget", "1"], "budget"),
    "a resume folder of nothing": (["--resume", "nowhere"], "nowhere"),
    "a resume of other settings": (["--resume", "other"], "other was started with no MODEL"),
    "an output folder in use": (["--output", "other"], "other"),
    "a vocabulary too small": ([], "vocabulary"),
    "a logger that is not installed": (["--log-with", "wandb"], "pip install wandb"),
}


@pytest.fixture(scope="module")
def used(tmp_path_factory, model) -> Path:
    """A directory with the bad inputs in it."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "corpus.xyz").write_text("x")
    (folder / "empty.jsonl").write_text("")
    config = json.loads((model / "config.json").read_text())
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    (folder / "other").mkdir()
    (folder / "other" / "run.json").write_text(json.dumps({"recipe": "pretrain", "seed": 7}))
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_status_2(case, used, arguments, monkeypatch, capsys):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard"])
    extra, word = BAD[case]
    before = snapshot(used)
    monkeypatch.chdir(used)
    if case == "a vocabulary too small":
        arguments = ["tiny/config.json", *arguments[1:]]
    status = small_inputs.status("pretrain", [*arguments, "--steps", "1", *extra])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and last.startswith("pretrain: ") and word in last
    assert snapshot(used) == before, "something was written"


def test_a_run_that_was_refused_leaves_its_folder_free(tmp_path, model, arguments, capfd):
    """The user can do what the message says, with the same --output."""
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = [str(tmp_path / "config.json"), *arguments[1:], "--steps", "1"]
    argv += ["--output", str(tmp_path / "out")]
    assert small_inputs.status("pretrain", argv) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("pretrain: a sequence of ") and "lower the budget to 64" in last
    assert not (tmp_path / "out").exists()
    assert small_inputs.status("pretrain", [*argv, "--budget", "64"]) == 0
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


def test_the_process_exits_with_that_status_and_without_a_traceback(used, arguments):
    done = run(*arguments, "--data", "corpus.xyz", cwd=used)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("pretrain: ")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_pack_trains_like_its_samples_one_by_one():
    """The recipe's own model: loss and gradients of a pack against each sample run alone."""
    import numpy as np
    import torch
    from nopad.collators import PackedCollator
    from nopad.packing import Pack, Sample
    from nopad.recipes import pretrain

    class Tokenizer:
        bos_token_id = eos_token_id = 0

        def __len__(self):
            return 512

    torch.manual_seed(0)
    model = pretrain.load_model(pretrain.parse_args([]), Tokenizer())
    generator = np.random.default_rng(0)
    samples = [Sample(generator.integers(0, 512, n)) for n in (1, 2, 97, 31, 256, 5)]
    pack = Pack.of(samples, budget=1024)

    def gradients(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=pack.num_label_tokens).loss
            loss.backward()
            total += loss.item()
        return total, {n: p.grad.clone() for n, p in model.named_parameters()}

    collate = PackedCollator()
    packed, packed_grads = gradients([collate(pack)])
    alone, alone_grads = gradients([collate([sample]) for sample in samples if len(sample) > 1])
    assert packed == pytest.approx(alone, rel=1e-6)
    for name, grad in packed_grads.items():
        torch.testing.assert_close(grad, alone_grads[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_a_backend_that_clips_by_its_own_settings_is_refused(kind, monkeypatch):
    import accelerate
    from nopad.recipes import pretrain

    fake = SimpleNamespace(
        distributed_type=accelerate.DistributedType(kind), num_processes=1, log_with=[]
    )
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: fake)
    with pytest.raises(ValueError, match=rf"{kind} clips gradients by its own.*nopad train-hf"):
        pretrain.create_accelerator(pretrain.parse_args([]))
