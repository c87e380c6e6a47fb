"""The files of recipes/launch: what Accelerate makes of them, and what the Slurm script starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulated
import small_inputs
import tiny_run
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from nopad.runtime import find_layout
from torch import nn

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
FILES = sorted(LAUNCH.glob("*.yaml"))
STEPS = 3
PRETENDED = Path(__file__).parent / "support" / "pretended_gpus.py"
PRETRAIN = ROOT / "recipes" / "pretrain.py"
WITH_HF = ROOT / "recipes" / "train_hf.py"


@pytest.fixture
def no_accelerator(monkeypatch):
    """No Accelerator of an earlier test: its settings would count, not those of the launch."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_what_the_file_says(path, monkeypatch, no_accelerator):
    parsed = launch_command_parser().parse_args(["--config_file", str(path), str(PRETRAIN)])
    args, *_ = _validate_launch_command(parsed)
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, str(value))
    sharded = path.stem in ("fsdp2", "hsdp")
    assert args.use_fsdp == sharded and args.mixed_precision == "bf16"
    if sharded:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert "TRANSFORMER" in str(os.environ["FSDP_AUTO_WRAP_POLICY"])
    if path.stem in SIZES:
        layout = ParallelismConfig()
        sizes = (layout.dp_replicate_size, layout.dp_shard_size, layout.tp_size, layout.sp_size)
        assert sizes == SIZES[path.stem]
        assert layout.total_size == args.num_processes
        with simulated.ranks(args.num_processes):
            found = find_layout(nn.Module())
        assert (found.tensor.size, found.sequence.size) == sizes[2:]


SIZES = {"hsdp": (2, 8, 1, 1), "sp": (4, 1, 1, 2), "tp": (1, 4, 2, 1)}
"""Replicas, shards, tensor- and sequence-parallel ranks of the files that have a layout."""


def arguments(folder: Path, **settings: object) -> list[str]:
    """A short run on the smallest data."""
    options = {"data": small_inputs.texts(folder, words=90), "budget": 256, "steps": STEPS,
               "tokenizer": small_inputs.tokenizer(folder), "warmup": 1, **settings}  # fmt: skip
    named = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [str(word) for pair in named for word in pair]


def launch(path: Path, cwd: Path, world: int, *command: object, **sizes: int) -> str:
    """Start ranks with a file, whose sizes are changed; return what they print."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    options = {"config_file": path, "num_processes": world, "num_machines": 1, "machine_rank": 0,
               "main_process_port": 0, "mixed_precision": "no"}  # fmt: skip
    options |= {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    start = [sys.executable, "-m", "accelerate.commands.launch", *words, PRETENDED, *command]
    done = subprocess.run(list(map(str, start)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def steps(folder: Path) -> list[dict]:
    """What is logged of each step: by pretrain.py, or by the HF Trainer."""
    if (folder / "log.jsonl").exists():
        return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def run_alone(recipe: Path, *command: object, world: int = 1) -> None:
    """Run a recipe on CPU ranks, as Accelerate sees them."""
    for code, _, error in tiny_run.launch(recipe, *command, world=world, check=False):
        assert code == 0, error[-3000:]


def assert_same_run(folder: Path, one: Path, within: float = 1e-5) -> None:
    assert len(steps(one)) == STEPS
    for step, wanted in zip(steps(folder), steps(one), strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=within)
        for name in {"tokens", "samples", "packs"} & set(wanted):
            assert step[name] == wanted[name]


def test_two_ranks_that_share_rows_train_as_one(tmp_path):
    """By the recipe's own option: Accelerate refuses sp_size on CPUs."""
    run = [small_inputs.model(tmp_path), *arguments(tmp_path, eval_every=100, prompt="w1 w2")]
    run_alone(PRETRAIN, *run, "--output", tmp_path / "one")
    run_alone(PRETRAIN, *run, "--output", tmp_path / "two", "--sequence-parallel", 2, world=2)
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe", "sizes", "packs", "banner"),
    [
        ("ddp", PRETRAIN, {}, 2, "2 data-parallel ranks"),
        ("fsdp2", WITH_HF, {}, 2, "2 data-parallel ranks"),
        ("hsdp", WITH_HF, {"dp_replicate": 2, "dp_shard": 2}, 4, "4 data-parallel ranks"),
        ("sp", PRETRAIN, {"dp_replicate": 1}, 1, "a group of 2 by sequence parallelism"),
        ("sp", WITH_HF, {"dp_replicate": 2}, 2, "a group of 2 by sequence parallelism"),
        ("tp", WITH_HF, {"dp_shard": 1}, 1, "a group of 2 by tensor parallelism"),
        ("tp", WITH_HF, {"dp_shard": 2}, 2, "a group of 2 by tensor parallelism"),
    ],
)
def test_the_ranks_of_the_file_train_as_one(tmp_path, name, recipe, sizes, packs, banner):
    """Layouts as on GPUs, which Accelerate takes these CPU ranks for; with fewer ranks."""
    base = small_inputs.checkpoint(tmp_path)
    every = {"eval_every": 100, "prompt": "w1 w2"} if recipe == PRETRAIN else {"log_every": 1}
    run = [base, *arguments(tmp_path, save_every=STEPS, **every)]
    run_alone(recipe, *run, "--output", tmp_path / "one", "--accumulation", packs)
    world = packs * (2 if name in ("sp", "tp") else 1)
    options = [*run, "--output", tmp_path / "run"]
    out = launch(LAUNCH / f"{name}.yaml", tmp_path, world, recipe, *options, **sizes)
    assert banner in out
    assert_same_run(tmp_path / "run", tmp_path / "one", 1e-4)
    optimizer = (tmp_path / "run" / f"checkpoint-{STEPS}").glob("optimizer*")
    assert bool(list(optimizer)) == (name != "tp")


@pytest.mark.parametrize("argv", [[], ["config"], ["base", "--resume"]])
def test_tensor_parallelism_starts_from_weights(argv, tmp_path, monkeypatch, no_accelerator):
    from nopad.recipes.train_hf import tensor_parallel

    base, config = small_inputs.checkpoint(tmp_path), tmp_path / "model"
    names = {"config": str(config), "base": str(base)}
    args = SimpleNamespace(model=names[argv[0]] if argv else None, resume=argv[1:] or None)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with simulated.ranks(2), pytest.raises(ValueError, match="from a checkpoint with weights"):
        tensor_parallel(args, SimpleNamespace(), SimpleNamespace())


def test_pretrain_refuses_tensor_parallelism(monkeypatch):
    from nopad.recipes.pretrain import create_accelerator, parse_args

    accelerator = SimpleNamespace(
        parallelism_config=SimpleNamespace(tp_size=2), num_processes=1, distributed_type="NO",
        log_with=None,
    )  # fmt: skip
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: accelerator)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="use nopad train-hf"):
        create_accelerator(parse_args([]))


def test_the_slurm_script_starts_torchrun_on_all_machines_and_resumes(tmp_path):
    commands = {
        "srun": 'shift; exec "$@"',
        "scontrol": "echo node-a; echo node-b",
        "torchrun": 'test "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 && printf "%s\\n" "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path / "run"), **job}
    script = LAUNCH / "slurm.sh"

    def started() -> list[str]:
        command = ["bash", str(script), "--data", "a b.jsonl"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = started()
    assert first[0] == "--nnodes=2" and "--rdzv-endpoint=node-a:29500" in first
    assert first[-5:] == ["recipes/pretrain.py", "--output", env["RUN"], "--data", "a b.jsonl"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    assert started()[-4] == "--resume"
    env.pop("RUN")
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert done.returncode and "set RUN to a folder" in done.stderr
