"""Recipes with compiled layers leave the weights of an uncompiled run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import small_inputs
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(recipe: str, arguments: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Run the recipe; return the weights it saves."""
    common = ["--tokenizer", folder / "tokenizer", "--budget", "64", "--steps", "3"]
    output = folder / "-".join([recipe, *arguments[:1]])
    rest = ["--learning-rate", "1e-2", "--warmup", "0", "--output", output]
    small_inputs.train(recipe, [*arguments, *common, *rest])
    return load_file(next(output.glob("*model.safetensors")))


def check_compiled(recipe: str, more: list[str], folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    args = [*inputs(recipe, folder), *more]
    ways = [["--layers", "compiled"], []]
    compiled, plain = (train(recipe, [*layers, *args], folder) for layers in ways)
    assert compiled.keys() == plain.keys()
    for name, weight in plain.items():
        assert torch.allclose(compiled[name], weight, atol=1e-4), name


def inputs(recipe: str, folder: Path) -> list[str]:
    small_inputs.tokenizer(folder)
    if recipe == "train_hf":
        model = small_inputs.model(folder)
        return ["--data", str(small_inputs.documents(folder)), str(model)]
    model = small_inputs.checkpoint(folder)
    return ["--data", str(small_inputs.chats(folder)), str(model)]


@pytest.mark.parametrize("recipe", ["train_hf", "sft"])
def test_recipes_pass_the_layers_on_to_the_trainer(recipe, tmp_path, monkeypatch):
    def stop(*args, layers, **options):
        raise InterruptedError(layers)

    monkeypatch.setattr("nopad.trainer.with_hf.PackedTrainer", stop)
    with pytest.raises(InterruptedError, match="stock"):
        train(recipe, ["--layers", "stock", *inputs(recipe, tmp_path)], tmp_path)


@pytest.mark.slow  # each part has a fast test: `--layers`, and what compiled layers compute
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("train_hf", []),
        ("sft", ["--lora", "4"]),
        ("train_hf", ["--checkpointing"]),
    ],
)
def test_a_compiled_run_leaves_the_weights_of_one_that_is_not(recipe, more, tmp_path, monkeypatch):
    """The graphs run eagerly: compiling kernels takes many times as long."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(
        importlib.import_module("nopad.trainer.layers.compile_layers"), "recompute_backend", counter
    )
    check_compiled(recipe, more, tmp_path, monkeypatch)
    assert counter.frame_count >= 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["train_hf", "sft"])
def test_a_run_compiled_to_kernels_leaves_the_weights_of_one_that_is_not(
    recipe, tmp_path, monkeypatch
):
    check_compiled(recipe, [], tmp_path, monkeypatch)
