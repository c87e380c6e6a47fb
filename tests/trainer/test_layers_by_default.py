"""Every front end prepares the layers and attaches the loss by itself, as its checkpoint did."""

from __future__ import annotations

import importlib

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from front_ends import Module, pl
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import TrainingArguments


def hf(model, folder, resume=False, **options) -> str:
    args = TrainingArguments(
        str(folder), max_steps=2 if resume else 1, use_cpu=True, report_to=[], disable_tqdm=True,
        save_steps=1,
    )  # fmt: skip
    trainer = PackedTrainer(model, args, train_dataset=tiny_run.dataset(), **options)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.prepared_layers.way


def accelerate(model, folder, resume=False, **options) -> str:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), **options)
    if resume:
        accelerator.load_state(str(folder / "state"))
    batches = iter(loader)
    accelerator.backward(model(**next(batches)).loss)
    next(batches)  # the first step has ended
    accelerator.save_state(str(folder / "state"))
    return loader.layers


def lightning(model, folder, resume=False, **options) -> str:
    data, path = PackedDataModule(tiny_run.dataset()), folder / "model.ckpt"
    settings = {"accelerator": "cpu", "max_steps": 2 if resume else 1, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    callback = PackedCallback(data, **options)
    trainer = pl.Trainer(**settings, **quiet, callbacks=[callback])
    trainer.fit(Module(model), data, ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return data.loader.layers


FRONT_ENDS = {"hf": hf, "accelerate": accelerate, "lightning": lightning}


@pytest.fixture
def counter(monkeypatch):
    """Graphs run eagerly here: compiling kernels takes many times as long."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    module = importlib.import_module("nopad.trainer.layers.compile_layers")
    monkeypatch.setattr(module, "recompute_backend", counter)
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_layers_are_chosen_told_and_kept_by_a_resumed_run(name, tmp_path, capsys, counter):
    train = FRONT_ENDS[name]
    assert train(tiny_run.model(), tmp_path / "cpu") == "stock"
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("nopad: loss without logits, stock layers") == 1
    assert train(tiny_run.model(), tmp_path, layers="compiled") == "compiled"
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("nopad: loss without logits, compiled layers") == 1
    assert counter.frame_count >= 1
    assert train(tiny_run.model(), tmp_path, resume=True) == "compiled", "as the checkpoint did"
    assert train(tiny_run.model(), tmp_path, resume=True, layers="stock") == "stock"
    told = "stock layers (the checkpoint was trained with compiled layers)"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["accelerate", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hf", "lightning"))]
)
def test_a_run_whose_compilation_failed_is_resumed_with_stock_layers(
    name, tmp_path, counter, monkeypatch
):
    train, layer = FRONT_ENDS[name], type(tiny_run.model().model.layers[0])
    assert train(tiny_run.model(), tmp_path, layers="compiled") == "compiled"
    original = layer.forward

    def with_a_graph_break(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", with_a_graph_break)
        assert train(tiny_run.model(), tmp_path, resume=True) == "stock"
    assert train(tiny_run.model(), tmp_path, resume=True) == "stock", "as the checkpoint did"


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_fp8_is_told_also_when_a_resumed_run_omits_it(name, tmp_path, capsys, emulated_fp8):
    train = FRONT_ENDS[name]
    assert train(tiny_run.model(), tmp_path, fp8=True) == "fp8"
    told = "nopad: loss without logits, compiled layers with fp8 products"
    assert capsys.readouterr().out.splitlines().count(told) == 1
    assert train(tiny_run.model(), tmp_path, resume=True, fp8=True) == "fp8"
    assert "checkpoint was trained with" not in capsys.readouterr().out
    assert train(tiny_run.model(), tmp_path, resume=True) == "compiled"
    assert "compiled layers (the checkpoint was trained with fp8 layers)" in capsys.readouterr().out


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_fp8_is_refused_by_a_line_where_it_cannot_run(name, tmp_path):
    with pytest.raises(ValueError, match=r"^fp8=True: fp8 products need a GPU, and .*; omit fp8$"):
        FRONT_ENDS[name](tiny_run.model(), tmp_path, fp8=True)


def test_layers_of_a_teacher_do_not_choose_those_of_the_student(counter):
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    models = [accelerator.prepare(tiny_run.model(attention)) for attention in ("sdpa", "nopad")]
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset())
    loader.layers = "compiled"  # as of a checkpoint
    next(iter(loader))
    assert [loader.prepared_layers[id(m)].way for m in models] == ["stock", "compiled"]
    assert loader.layers == "compiled"


def test_torch_compile_compiles_the_whole_model_instead(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, torch_compile=True)
    trainer = PackedTrainer(tiny_run.model(), args, train_dataset=tiny_run.dataset())
    trainer.get_train_dataloader()
    assert trainer.prepared_layers.way == "stock"
    trainer = PackedTrainer(
        tiny_run.model(), args, train_dataset=tiny_run.dataset(), layers="compiled"
    )
    with pytest.raises(ValueError, match=r"^layers='compiled': torch_compile=True compiles the wh"):
        trainer.get_train_dataloader()


def test_a_loss_that_was_attached_keeps_its_options(tmp_path):
    model = tiny_run.model()
    attached = attach_loss(model, z_loss=0.5)
    accelerate(model, tmp_path)
    assert model.nopad_loss is attached


def test_a_prepared_model_keeps_its_forward_when_the_loss_is_detached():
    AcceleratorState._reset_state()
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(tiny_run.model())
    prepared = model.forward
    attach_loss(model)
    model.nopad_loss.detach()
    assert model.forward == prepared
    AcceleratorState._reset_state()


@pytest.mark.parametrize("name", ["num_items_in_batch", "loss_weights"])
def test_a_count_that_was_rounded_is_refused(name):
    model, pack = tiny_run.model(), tiny_run.packs(tiny_run.dataset(), 1)[0]
    attach_loss(model)
    batch = tiny_run.collate(pack)
    rounded = torch.ones_like(batch["labels"], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"{name} was cast to .*cast_forward_inputs"):
        model(**batch, **{name: rounded})
