"""Every front end refuses layouts in which ranks share a model."""

from __future__ import annotations

from typing import Any

import pytest
import simulated
import tiny_run
from torch.distributed.device_mesh import init_device_mesh

SHARED = r"tensor parallelism over 2 ranks: {} gives every rank packs of its own.*use DDP or FSDP"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_run.model().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def accelerate_states(monkeypatch):
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_a_tp_plan_is_refused_by_the_hf_trainer_and_by_a_data_set(
    saved_model, tmp_path
):
    from hf_child import trainer
    from nopad.trainer.with_hf import PackedTrainer
    from transformers import AutoModelForCausalLM, TrainingArguments

    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    with simulated.ranks(2):
        model = AutoModelForCausalLM.from_pretrained(saved_model, tp_plan="auto")
        with pytest.raises(ValueError, match=SHARED.format("PackedTrainer")):
            PackedTrainer(model, args, None, tiny_run.dataset(rank=0, world_size=1))
        with pytest.raises(ValueError, match="tensor parallelism over 2 ranks"):
            next(iter(tiny_run.dataset()))
        del model
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1)
    run.train()


def test_a_parallelism_config_is_refused_by_the_hf_trainer(tmp_path):
    from accelerate import ParallelismConfig
    from hf_child import trainer

    config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=SHARED.format("PackedTrainer")):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, parallelism_config=config)


def test_accelerate_s_loader_refuses_a_parallelism_config_and_a_sharded_model():
    from accelerate import Accelerator, ParallelismConfig
    from nopad.trainer.with_accelerate import PackedAccelerateLoader
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    accelerator, model = Accelerator(cpu=True), tiny_run.model()
    accelerator._models.append(model)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), check=False)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match=SHARED.format("PackedAccelerateLoader")):
        next(iter(loader))
    accelerator.state.parallelism_config = None
    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
        with pytest.raises(ValueError, match=SHARED.format("PackedAccelerateLoader")):
            next(iter(loader))
        accelerator._models.clear()
        del model, mesh


def test_lightning_s_model_parallel_strategy_is_refused(tmp_path):
    import lightning.pytorch as pl
    from front_ends import Module
    from lightning.pytorch.strategies import ModelParallelStrategy
    from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

    trainer: Any = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data, module = (
        PackedDataModule(tiny_run.dataset(), tiny_run.dataset()),
        Module(tiny_run.model()),
    )
    data.trainer = trainer
    with simulated.ranks(2):
        names = ("data_parallel", "tensor_parallel")
        trainer.strategy._device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        for refused in (
            lambda: PackedCallback(data).setup(trainer, module, "fit"),
            data.train_dataloader,
            data.val_dataloader,
        ):
            with pytest.raises(ValueError, match=SHARED.format("PackedDataModule")):
                refused()
        trainer.strategy._device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
        assert data.train_dataloader().accumulation_steps == 1
