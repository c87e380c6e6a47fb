"""The files of recipes/launch: what Accelerate makes of them, and what the Slurm script starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_inputs
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "launch").glob("*.yaml"))
RECIPE = ROOT / "recipes" / "pretrain.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_what_the_file_says(path, monkeypatch):
    parsed = launch_command_parser().parse_args(["--config_file", str(path), str(RECIPE)])
    args, *_ = _validate_launch_command(parsed)
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, str(value))
    sharded = path.stem in ("fsdp2", "hsdp")
    assert args.use_fsdp == sharded and args.mixed_precision == "bf16"
    if sharded:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert "TRANSFORMER" in str(os.environ["FSDP_AUTO_WRAP_POLICY"])
    if path.stem == "hsdp":
        layout = ParallelismConfig()
        assert (layout.dp_replicate_size, layout.dp_shard_size) == (2, 8)
        assert layout.total_size == args.num_processes == 16


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_recipe_starts_with_the_file(path, tmp_path):
    """On two CPU ranks, where Accelerate does not shard: the launch, not the layout, is tried."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path,
              "--num_processes", 2, "--num_machines", 1, "--machine_rank", 0,
              "--main_process_port", 0, "--mixed_precision", "no"]  # fmt: skip
    if path.stem == "hsdp":
        launch += ["--parallelism_config_dp_replicate_size", 2,
                   "--parallelism_config_dp_shard_size", 1]  # fmt: skip
    arguments = ["--data", small_inputs.documents(tmp_path), "--budget", 128, "--steps", 2,
                 small_inputs.model(tmp_path), "--warmup", 1, "--eval-every", 100,
                 "--tokenizer", small_inputs.tokenizer(tmp_path), "--output", "run"]  # fmt: skip
    command = list(map(str, [*launch, RECIPE, *arguments]))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint-2").is_dir() and "2 processes" in done.stdout


def test_the_slurm_script_starts_torchrun_on_all_machines_and_resumes(tmp_path):
    commands = {
        "srun": 'shift; exec "$@"',
        "scontrol": "echo node-a; echo node-b",
        "torchrun": 'printf "%s\\n" "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path / "run"), **job}
    script = ROOT / "recipes" / "launch" / "slurm.sh"

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
