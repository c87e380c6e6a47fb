"""Packs in Lightning: a data module and a callback; `training_step` stays yours.

    data = PackedDataModule(PackedDataset(...), num_workers=2)
    Trainer(callbacks=[PackedCallback(data)], accumulate_grad_batches=4, ...).fit(module, data)

    def training_step(self, batch, _):
        return self.model(**batch).loss         # the exact token mean, over accumulation and ranks

The loss of a batch is its share of the step's loss; the mean of the step over all ranks is logged
and shown in the progress bar as `pack/loss`. Lightning would save the state of rank 0's loader, one
batch ahead. The callback saves the state after the last trained batch instead, merged over ranks,
and the random states of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...packing import Pack, PackedDataset
from ...runtime import (
    Layout,
    find_layout,
    gather_rng_states,
    join_sequence_group,
    load_rng_states,
    rng_states,
)
from ..data.data_state import gather_data_state, restore_draws
from ..data.loader import Batch, EvaluationLoader, PackedLoader, PackInfo
from ..data.model_limits import ModelLimits
from ..fused.fuse_layers import fuse_layers
from ..loss.attached_loss import attach_loss
from ..monitoring.finite_check import FiniteCheck, check_weights
from ..monitoring.preflight import (
    check_first_batches,
    check_run,
    describe_speedups,
    print_banner,
)
from ..monitoring.throughput import ThroughputMeter
from .finite_saves import guard_saves
from .hooks import causal_lm, has_causal_lm, pl

DATA_KEY, ACCUMULATION_KEY, RNG_KEY = "nopad_data", "nopad_accumulation", "nopad_random"
"""nopad's keys in Lightning checkpoints."""


class LightningPackedLoader(PackedLoader):
    """The batches of this rank; batches that Lightning prefetched but did not train come again."""

    tracked = False
    """Whether a `PackedCallback` reports the batches that were trained on."""
    overfits = False
    """Whether every epoch repeats the first packs (Lightning's `overfit_batches`)."""
    trained_state: dict | None = None
    """The data state after the last trained step, or at the start of the iteration."""

    def __iter__(self) -> Iterator[Batch]:
        self.rewind_to_trained()
        if self.overfits:
            self.dataset.rewind()
        self.trained_state = self.state()
        yield from super().__iter__()

    def mark_trained(self) -> tuple[PackInfo, dict | None]:
        """Record the next batch as trained; return its pack, and the state if it ends a step."""
        info, state = self.issued.popleft()
        self.trained_state = state or self.trained_state
        return info, state

    def rewind_to_trained(self) -> None:
        """Move the data back to the end of the last trained step."""
        if self.tracked and self.issued:
            self._state = self.trained_state
        self.issued.clear()
        if self._state is not None:
            self.load_state(self._state)


class PackedDataModule(pl.LightningDataModule):
    """Packs for training and, if there is a validation set, for validation."""

    def __init__(
        self,
        train_dataset: PackedDataset,
        val_dataset: PackedDataset | None = None,
        collator: Callable[[Pack], Batch] | None = None,
        num_workers: int = 0,
        sequence_parallel: int = 1,
    ):
        """sequence_parallel: ranks that share the tokens of each pack."""
        super().__init__()
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.collator, self.num_workers = collator, num_workers
        self.sequence_parallel = sequence_parallel
        self.loader: LightningPackedLoader | None = None
        self.checked_model: nn.Module | None = None
        """The model whose vocabulary and positions the batches are checked against."""
        self._hide_validation()

    def _hide_validation(self) -> None:
        if self.val_dataset is None:  # otherwise Lightning would ask for a validation_step
            self.val_dataloader = super().val_dataloader

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._hide_validation()  # unpickling restores the method of the class

    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        _check_accumulation(trainer)
        if self.loader is not None and self.loader.dataset is self.train_dataset:
            self.loader.rewind_to_trained()
        self.loader = LightningPackedLoader(
            self.train_dataset,
            self.collator,
            accumulation_steps=trainer.accumulate_grad_batches,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            layout=self.layout(trainer),
        )
        self.loader.overfits = trainer.overfit_batches > 0
        self.loader.tracked = any(isinstance(c, PackedCallback) for c in trainer.callbacks)
        if self.checked_model is not None:
            check_first_batches(self.loader, self.checked_model)
        return self.loader

    def layout(self, trainer: Any) -> Layout:
        """Return what this process is for, by the strategy's mesh, the model and the settings."""
        module = trainer.lightning_module or nn.Module()
        mesh = getattr(trainer.strategy, "device_mesh", None)
        return find_layout(module, mesh=mesh, sequence_parallel=self.sequence_parallel)

    def val_dataloader(self) -> Any:
        assert self.val_dataset is not None
        # The limit is needed to weigh the losses: each batch counts by its share of what is read.
        limit = getattr(self.trainer, "limit_val_batches", None)
        loader = EvaluationLoader(
            self.val_dataset,
            self.collator,
            limit if isinstance(limit, int) else None,
            None if self.trainer is None else self.layout(self.trainer),
        )
        if self.checked_model is not None:
            loader.limits = ModelLimits.of(self.checked_model)
        return loader


class PackedCallback(pl.Callback):
    """Attach the exact loss, check the run, save data and random states, log throughput."""

    def __init__(
        self,
        data: PackedDataModule,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        fused: bool = True,
        check: bool = True,
        continue_on_nan: bool = False,
    ):
        """Take the options of the loss.

        label_smoothing: fraction of each label that is spread over the vocabulary.
        z_loss: weight of the squared log-normalizer in the loss.
        fused: on a GPU, use fused kernels wherever they compute what the model's own layers do;
            the banner names them.
        check: before the first step, refuse runs that would train wrongly.
        continue_on_nan: train on after a loss that is not finite, instead of raising
            `NonFiniteError`; weights that are not finite are not saved.
        """
        self.data, self.check, self.fused = data, check, fused
        self.finite_check = FiniteCheck(continue_on_nan)
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.meter = ThroughputMeter()
        self._measured_loader: LightningPackedLoader | None = None
        self._loss: Any = None
        self._fused_layers: Any = None
        self._rng_states: list[list[Tensor]] | None = None
        """Random states of a checkpoint, until the training starts."""
        self._step_rng: list[Tensor] | None = None
        """Random states at the start of the step, inside of it: what is saved is complete steps."""
        self._micro_losses: list[Tensor] = []
        """Losses of the micro-batches since the last step; Lightning has divided them already."""
        self._validation = ExitStack()
        self._sequence_group: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._rng_states = self._step_rng = None
            # First, so that a callback that raises finds the data state in step with the weights.
            trainer.callbacks = sorted(trainer.callbacks, key=lambda other: other is not self)
            guard_saves(trainer, self.finite_check)
        self._loss = self._fused_layers = None
        if stage != "predict" and (stage != "fit" or has_causal_lm(pl_module)):
            self._prepare_model(trainer, pl_module, stage)

    def _prepare_model(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Attach the loss and fuse the layers, before the model is wrapped."""
        model, layout = causal_lm(pl_module), self.data.layout(trainer)
        if self._sequence_group is None:
            self._sequence_group = join_sequence_group(layout)
        self._loss = attach_loss(model, **self.options, sequence_group=self._sequence_group)
        if stage == "fit" and self.fused:
            self._fused_layers = fuse_layers(model, trainer.strategy.root_device)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loss is None:  # the module has created its model in `configure_model`
            self._prepare_model(trainer, pl_module, "fit")
        model = causal_lm(pl_module)
        if self.check:
            with trainer.precision_plugin.forward_context():
                layout = self.data.layout(trainer)
                banner = check_run(model, self.data.train_dataset, self.data.collator, layout)
            print_banner([*banner, describe_speedups(self._loss, self._fused_layers)])
            self.data.checked_model = model

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_meter(pl_module)
        if self._rng_states is not None:
            load_rng_states(self._rng_states, trainer.strategy.root_device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.data.loader is not self._measured_loader:  # Lightning has reloaded it
            self._start_meter(pl_module)

    def _start_meter(self, pl_module: pl.LightningModule) -> None:
        assert self.data.loader is not None
        self._measured_loader = self.data.loader
        self.meter = ThroughputMeter.of(self.data.loader, causal_lm(pl_module))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.data.loader is not None
        self._step_rng = self._step_rng or rng_states(trainer.strategy.root_device)
        now, at_start = trainer.accumulate_grad_batches, self.data.loader.accumulation_steps
        if now != at_start:
            raise ValueError(
                f"accumulate_grad_batches={now}, but the packs of this run are grouped in steps of "
                f"{at_start}: pass it to the Trainer, and do not change it during the run"
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.enter_context(self.meter.paused())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._validation.close()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self.data.loader is not None
        info, state = self.data.loader.mark_trained()
        self.meter.add(info, batch["labels"], self._loss.token_losses)
        if outputs and "loss" in outputs:  # manual optimization may return anything
            self._micro_losses.append(outputs["loss"].detach())
        if state is None:
            return
        self._step_rng = None
        losses, self._micro_losses = self._micro_losses, []
        for loss in losses:
            self.finite_check.add(loss)
        self.finite_check.end_step(f"step {trainer.global_step}")
        every = trainer.log_every_n_steps  # 0 means never
        if every and trainer.global_step % every == 0:
            self._log_step(pl_module, losses)

    def _log_step(self, pl_module: pl.LightningModule, losses: list[Tensor]) -> None:
        rates = {f"pack/{name}": value for name, value in self.meter.read().items()}
        pl_module.log_dict(rates, batch_size=1)
        bar = {"prog_bar": True, "batch_size": 1}
        pl_module.log("tok/s", rates["pack/tokens_per_second"], **bar)
        if losses:
            pl_module.log("pack/loss", torch.stack(losses).sum(), sync_dist=True, **bar)
        self.meter.reset()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.finite_check.continue_on_nan:
            self.finite_check.flush()
            check_weights(pl_module, f"step {trainer.global_step}")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict
    ) -> None:
        loader = self.data.loader  # None before the training: a tuner saves and restores there
        state = self.data.train_dataset.state_dict() if loader is None else loader.trained_state
        checkpoint[DATA_KEY] = gather_data_state(loader, state)
        checkpoint[ACCUMULATION_KEY] = trainer.accumulate_grad_batches
        device = trainer.strategy.root_device
        checkpoint[RNG_KEY] = gather_rng_states(device, self._step_rng)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict
    ) -> None:
        keys = (DATA_KEY, ACCUMULATION_KEY, RNG_KEY)
        missing = [name for name in keys if name not in checkpoint]
        if missing:
            raise ValueError(
                f"the checkpoint has no data position ({', '.join(missing)}): it was saved "
                "without PackedCallback; start a new run from its weights instead"
            )
        self.data.train_dataset.load_state_dict(restore_draws(checkpoint[DATA_KEY]))
        self.data.loader = None  # otherwise the next loader would continue where this one is
        self._rng_states = checkpoint[RNG_KEY]
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        accumulation = checkpoint[ACCUMULATION_KEY], trainer.accumulate_grad_batches
        _count_complete_steps(progress, *accumulation)


def _count_complete_steps(progress: dict, before: int, now: int) -> None:
    """Convert Lightning's counts of batches to complete steps of the accumulation that is now.

    Lightning steps whenever its count is a multiple of the accumulation. The checkpoint holds
    complete steps only, although it may have been saved inside of one, when a batch failed.
    """
    batches = progress["current"]
    is_saved_by_step = not batches["processed"] % before  # not yet `completed` then
    is_saved_by_step &= batches["completed"] < batches["processed"]
    for counts in (batches, progress["total"]):
        complete = counts["processed"] // before * now
        counts.update(dict.fromkeys(counts, complete), completed=complete - is_saved_by_step)


def _check_accumulation(trainer: Any) -> None:
    """Refuse settings with which Lightning would step in the middle of our optimizer steps."""
    size, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
    scheduler = pl.callbacks.GradientAccumulationScheduler  # pyright: ignore[reportAttributeAccessIssue]
    for callback in trainer.callbacks:
        if isinstance(callback, scheduler) and set(callback.scheduling.values()) != {size}:
            raise ValueError(
                f"GradientAccumulationScheduler({callback.scheduling}): packs are grouped in steps "
                "of one size; omit it and pass accumulate_grad_batches= to the Trainer"
            )
    if isinstance(limit, int) and limit % size and not trainer.fast_dev_run:
        raise ValueError(
            f"limit_train_batches={limit} ends epochs inside a step of accumulate_grad_batches="
            f"{size} packs: pass a multiple, such as {max(limit // size, 1) * size}"
        )
