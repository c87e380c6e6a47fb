"""A recipe that diverges stops with one line and status 1, and keeps its finite checkpoints."""

from __future__ import annotations

import pytest
import small_inputs
import torch

EXTRA = {
    "pretrain": ["--steps", "8", "--warmup", "0", "--clip", "1e30", "--weight-decay", "0"],
    "train_hf": ["--steps", "8", "--warmup", "0"],
    "pretrain_lightning": ["--steps", "8", "--warmup", "0", "--accelerator", "cpu"],
}


def run(recipe: str, folder) -> int:
    inputs = ["--data", small_inputs.documents(folder), small_inputs.model(folder),
              "--tokenizer", small_inputs.tokenizer(folder), "--budget", "64", "--output", "out",
              "--learning-rate", "1e-3", "--save-every", "1"]  # fmt: skip
    return small_inputs.status(recipe, [*inputs, *EXTRA[recipe]])


@pytest.fixture
def diverging(monkeypatch, tmp_path):
    """AdamW's fourth step makes the weights infinite."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    step, calls = torch.optim.AdamW.step, [0]

    def spoiled(self, *args, **kwargs):
        out = step(self, *args, **kwargs)
        calls[0] += 1
        if calls[0] == 4:
            for group in self.param_groups:
                group["params"][0].data.view(-1)[0] = torch.inf
        return out

    monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)


def saved_weights(folder) -> dict:
    from safetensors.torch import load_file

    found = {path: load_file(path) for path in folder.rglob("*.safetensors")}
    for path in folder.rglob("*.ckpt"):
        found[path] = torch.load(path, weights_only=True)["state_dict"]
    return found


@pytest.mark.parametrize("recipe", EXTRA)
def test_a_diverged_run_is_told_in_a_line_and_keeps_what_is_finite(
    recipe, diverging, tmp_path, capsys
):
    assert run(recipe, tmp_path) == 1
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith(f"{recipe}: ")]
    assert len(lines) == 1 and "not finite after" in lines[0] and "done" not in told.out
    saved = saved_weights(tmp_path / "out")
    assert saved
    for path, weights in saved.items():
        assert all(tensor.isfinite().all() for tensor in weights.values()), path
