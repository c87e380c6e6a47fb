"""Front ends refuse layouts that they do not serve, and read the packs of their replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import simulated
import tiny_run
from torch.distributed.device_mesh import init_device_mesh

PIPELINE = "pipeline parallelism over 2 ranks is not supported"


@pytest.fixture(autouse=True)
def accelerate_states(monkeypatch):
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})


def test_a_parallelism_config_that_the_ranks_cannot_have_is_refused(tmp_path):
    from accelerate import ParallelismConfig
    from hf_child import trainer

    config = ParallelismConfig(tp_size=2)
    with pytest.raises(ValueError, match="over 2 ranks does not divide the run's 1 ranks"):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, parallelism_config=config)


def test_sp_size_becomes_data_parallelism_for_the_hf_trainer(monkeypatch):
    from accelerate import ParallelismConfig
    from nopad.trainer.with_hf.arguments import take_sequence_parallel

    def taken(size: int = 1, **sizes: int) -> tuple[int, int, int, int]:
        args: Any = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes))
        kept = args.parallelism_config
        found = take_sequence_parallel(args, size)
        assert kept.sp_size == sizes["sp_size"]  # the user's object is not changed
        config = args.parallelism_config
        return found, config.sp_size, config.dp_replicate_size, config.dp_shard_size

    assert taken(sp_size=2) == (2, 1, 1, 1)  # Accelerate sets the number of replicas
    assert taken(sp_size=2, dp_shard_size=4) == (2, 1, 1, 8)
    assert taken(sp_size=2, dp_replicate_size=4) == (2, 1, 4 * 2, 1)
    assert taken(3, sp_size=1) == (3, 1, 1, 1)
    launched: Any = SimpleNamespace(parallelism_config=None)
    assert take_sequence_parallel(launched, 1) == 1 and launched.parallelism_config is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")  # as `accelerate launch` does
    assert take_sequence_parallel(launched, 1) == 2 and launched.parallelism_config.sp_size == 1
    with pytest.raises(
        ValueError, match="sequence_parallel=3, but parallelism_config has sp_size=2"
    ):
        taken(3, sp_size=2)


def test_pipeline_parallelism_is_refused_by_accelerate_s_loader():
    from accelerate import Accelerator
    from nopad.trainer.with_accelerate import PackedAccelerateLoader

    accelerator: Any = Accelerator(cpu=True)
    accelerator._models.append(tiny_run.model())
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), check=False)
    accelerator.state.parallelism_config = SimpleNamespace(pp_size=2)
    with pytest.raises(ValueError, match=PIPELINE):
        next(iter(loader))


def test_accelerate_s_loader_counts_its_replicas_before_it_is_read():
    from accelerate import Accelerator
    from nopad.trainer.with_accelerate import PackedAccelerateLoader

    accelerator = Accelerator(cpu=True)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), sequence_parallel=2)
    with simulated.ranks(4, rank=2):
        assert loader.packs_at_a_time == 2 and loader.dataset.ranks() == (1, 2)


def test_lightning_s_data_module_reads_the_packs_of_its_replica():
    import lightning.pytorch as pl
    from front_ends import Module
    from lightning.pytorch.strategies import ModelParallelStrategy
    from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

    trainer: Any = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = PackedDataModule(tiny_run.dataset(), tiny_run.dataset())
    data.trainer = trainer
    with simulated.ranks(4, rank=2):
        names = ("data_parallel", "tensor_parallel")
        trainer.strategy._device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        assert data.train_dataloader().packs_at_a_time == 2
        assert data.val_dataloader().dataset.ranks() == (1, 2)
        names = ("data_parallel", "pp")
        trainer.strategy._device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for refused in (
            lambda: PackedCallback(data).setup(trainer, Module(tiny_run.model()), "fit"),
            data.train_dataloader,
            data.val_dataloader,
        ):
            with pytest.raises(ValueError, match=PIPELINE):
                refused()
        trainer.strategy._device_mesh = None
