"""Packs in Lightning: a data module and a callback; the module's `training_step` stays yours.

    data = PackedDataModule(PackedDataset(...), num_workers=2)
    Trainer(callbacks=[PackedCallback(data)], accumulate_grad_batches=4, ...).fit(module, data)

    def training_step(self, batch, _):
        return self.model(**batch).loss         # the exact token mean, over accumulation and ranks

A batch's loss is its share of the step's; the mean of a step, over ranks too, is in the log and in
the bar as `pack/loss`. Lightning keeps the state of rank 0's loader, one batch ahead. Here the
callback keeps the state of the last batch that was stepped, joined over ranks, in the checkpoint,
and every rank's random numbers beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...packing import Pack, PackedDataset
from ...runtime import gather_rng_states, load_rng_states, unwrap_peft
from ..data.data_state import gathered_state
from ..data.loader import Batch, EvaluationLoader, PackedLoader, PackInfo
from ..loss.attached_loss import attach_loss
from ..monitoring.preflight import check_run, guard, print_banner
from ..monitoring.throughput import Meter, away

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ImportError:
        try:
            import pytorch_lightning as pl
        except ImportError:
            raise ImportError(
                "lightning is not installed: pip install 'nopad[lightning]'"
            ) from None

KEY, WINDOW, RANDOM = "nopad_data", "nopad_accumulation", "nopad_random"


class LightningPacks(PackedLoader):
    """The batches of this rank; those that Lightning read ahead and left out come again."""

    told = False
    """Whether somebody says which batches were trained on."""
    rewinds = False
    """Whether every epoch is of the same first packs."""
    stepped: dict | None = None
    """The state behind the last step that was trained, or where the iteration began."""

    def __iter__(self) -> Iterator[Batch]:
        self.go_back()
        if self.rewinds:
            self.dataset.rewind()
        self.stepped = self.state()
        yield from super().__iter__()

    def take(self) -> tuple[PackInfo, dict | None]:
        """Hear that the next batch was trained on; return its pack, and the state if it steps."""
        info, state = self.handed_out.popleft()
        self.stepped = state or self.stepped
        return info, state

    def go_back(self) -> None:
        """Put the data behind the last step, whatever was handed out since."""
        if self.told and self.handed_out:
            self._state = self.stepped
        self.handed_out.clear()
        if self._state is not None:
            self.load_state(self._state)


class PackedDataModule(pl.LightningDataModule):
    """Training packs, and packs to validate on if there are any."""

    def __init__(
        self,
        train: PackedDataset,
        validation: PackedDataset | None = None,
        collator: Callable[[Pack], Batch] | None = None,
        num_workers: int = 0,
    ):
        super().__init__()
        self.train, self.validation = train, validation
        self.collator, self.num_workers = collator, num_workers
        self.loader: LightningPacks | None = None
        self.checked: nn.Module | None = None
        """The model whose batches are refused where it was not made for them."""
        self._without_validation()

    def _without_validation(self) -> None:
        if self.validation is None:  # else Lightning would miss a validation_step
            self.val_dataloader = super().val_dataloader

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._without_validation()  # a pickled method comes back as that of the class

    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        _check_windows(trainer)
        if self.loader is not None and self.loader.dataset is self.train:
            self.loader.go_back()
        self.loader = LightningPacks(
            self.train,
            self.collator,
            accumulation=trainer.accumulate_grad_batches,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )
        self.loader.rewinds = trainer.overfit_batches > 0
        self.loader.told = any(isinstance(one, PackedCallback) for one in trainer.callbacks)
        if self.checked is not None:
            guard(self.loader, self.checked)
        return self.loader

    def val_dataloader(self) -> Any:
        assert self.validation is not None
        # Else each of them would count as its share of the whole set.
        limit = getattr(self.trainer, "limit_val_batches", None)
        return EvaluationLoader(
            self.validation, self.collator, limit if isinstance(limit, int) else None
        )


class PackedCallback(pl.Callback):
    """Attach the exact loss, check the run, keep data and random state, log what packing does."""

    def __init__(
        self,
        data: PackedDataModule,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        check: bool = True,
    ):
        """Take what the loss takes.

        label_smoothing: share of a label that is spread over the vocabulary.
        z_loss: weight of the squared log-normalizer in the loss.
        check: refuse, before the first step, what would train wrongly.
        """
        self.data, self.check = data, check
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.meter = Meter()
        self._measured: LightningPacks | None = None
        self._loss: Any = None
        self._random: list[list[Tensor]] | None = None
        """Where a checkpoint's random numbers stood, until the training begins."""
        self._losses: list[Tensor] = []
        """Of the micro-batches since the last step, divided by Lightning: shares of its loss."""
        self._validating = ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._random = None
        if stage != "predict":
            self._loss = attach_loss(causal_lm(pl_module), **self.options)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = causal_lm(pl_module)
        if self.check:
            with trainer.precision_plugin.forward_context():
                print_banner(check_run(model, self.data.train, self.data.collator))
            self.data.checked = model

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._measure(pl_module)
        if self._random is not None:
            load_rng_states(self._random, trainer.strategy.root_device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.data.loader is not self._measured:  # Lightning was asked to reload it
            self._measure(pl_module)

    def _measure(self, pl_module: pl.LightningModule) -> None:
        assert self.data.loader is not None
        self._measured = self.data.loader
        self.meter = Meter.of(self.data.loader, causal_lm(pl_module))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.data.loader is not None
        now, made = trainer.accumulate_grad_batches, self.data.loader.accumulation
        if now != made:
            raise ValueError(
                f"accumulate_grad_batches={now}, but the packs of this run's steps were made for "
                f"{made}: give it to the Trainer, and do not change it during the run"
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validating.enter_context(away())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validating.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._validating.close()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self.data.loader is not None
        info, state = self.data.loader.take()
        self.meter.add(info, batch["labels"], self._loss.token_losses)
        if outputs and "loss" in outputs:  # who optimizes by hand may return what they like
            self._losses.append(outputs["loss"].detach())
        if state is None:
            return
        losses, self._losses = self._losses, []
        every = trainer.log_every_n_steps  # 0 is Lightning's word for never
        if every and trainer.global_step % every == 0:
            rates = {f"pack/{name}": value for name, value in self.meter.read().items()}
            pl_module.log_dict(rates, batch_size=1)
            shown = {"prog_bar": True, "batch_size": 1}
            pl_module.log("tok/s", rates["pack/tokens_per_second"], **shown)
            if losses:
                pl_module.log("pack/loss", torch.stack(losses).sum(), sync_dist=True, **shown)
            self.meter.reset()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict
    ) -> None:
        if self.data.loader is not None:
            checkpoint[KEY] = gathered_state(self.data.loader, self.data.loader.stepped)
            checkpoint[WINDOW] = trainer.accumulate_grad_batches
            checkpoint[RANDOM] = gather_rng_states(trainer.strategy.root_device)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict
    ) -> None:
        missing = [name for name in (KEY, WINDOW, RANDOM) if name not in checkpoint]
        if missing:
            raise ValueError(
                f"the checkpoint holds no data position ({', '.join(missing)}): it was saved "
                "without PackedCallback; start a new run from its weights instead"
            )
        self.data.train.load_state_dict(checkpoint[KEY])
        self.data.loader = None  # else the next one would go on where this one stood
        self._random = checkpoint[RANDOM]
        # Lightning counts batches, and steps where the count divides by the accumulation. What was
        # saved are whole steps, whatever the accumulation is now.
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        steps = batches["ready"] // checkpoint[WINDOW]
        more = steps * trainer.accumulate_grad_batches - batches["ready"]
        batches.update({name: count + more for name, count in batches.items()})


class AfterStep(pl.Callback):
    """Something to do after each optimizer step, never in the middle of an accumulation."""

    _last = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step != self._last:
            self._last = trainer.global_step
            self.after_step(trainer, pl_module)

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hear that the optimizer has stepped."""


def _check_windows(trainer: Any) -> None:
    """Refuse what would have Lightning step where no step of the packs ends."""
    size, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
    scheduler = pl.callbacks.GradientAccumulationScheduler  # pyright: ignore[reportAttributeAccessIssue]
    for callback in trainer.callbacks:
        if isinstance(callback, scheduler) and set(callback.scheduling.values()) != {size}:
            raise ValueError(
                f"GradientAccumulationScheduler({callback.scheduling}): the steps of packs are all "
                "of one size; leave it out and give accumulate_grad_batches= to the Trainer"
            )
    if isinstance(limit, int) and limit % size and not trainer.fast_dev_run:
        raise ValueError(
            f"limit_train_batches={limit} ends epochs inside a step of accumulate_grad_batches="
            f"{size} packs: give a multiple, such as {max(limit // size, 1) * size}"
        )


def causal_lm(module: nn.Module) -> nn.Module:
    """Find the HF causal LM inside a Lightning module."""
    for part in module.modules():
        if hasattr(part, "get_output_embeddings") and hasattr(part, "loss_function"):
            return unwrap_peft(part)
    raise ValueError(f"{type(module).__name__} holds no HF causal LM: keep it as an attribute")
