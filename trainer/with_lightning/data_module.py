"""`PackedDataModule`: packs for training and validation; plain data is packed when `fit` starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn

from ...packing import Pack
from ...runtime import Layout, find_layout
from ..data.loader import Batch, EvaluationLoader, PackInfo, UnsizedLoader
from ..data.model_limits import ModelLimits
from ..data.plain_data import check_plain, pack_like, pack_plain, refuse_plain_settings
from ..monitoring.preflight import check_first_batches
from .hooks import causal_lm, pl


class LightningPackedLoader(UnsizedLoader):
    """The batches of this rank; batches that were prefetched but not trained are issued again."""

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
        assert self.trained_state is not None
        self.dataset.count_until(self.trained_state)  # Lightning has prefetched the next batch
        return info, state

    def rewind_to_trained(self) -> None:
        """Move the data back to the end of the last trained step."""
        if self.tracked and self.issued:
            self._state = self.trained_state
        self.issued.clear()
        if self._state is not None:
            self.load_state(self._state)


class LightningEvaluationLoader(EvaluationLoader):
    """Has no length: if Lightning read a fraction of it, the weights of batches would be wrong."""

    def __len__(self) -> int:
        raise TypeError("pass limit_val_batches as a number of packs, not as a fraction")


class PackedDataModule(pl.LightningDataModule):
    """Packs for training and, if there is a validation set, for validation."""

    def __init__(
        self,
        train_dataset: Any,
        val_dataset: Any = None,
        collator: Callable[[Pack], Batch] | None = None,
        num_workers: int = 0,
        *,
        budget: int | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        sequence_parallel: int = 1,
        accumulation_steps: int | None = None,
    ):
        """Take packs, or plain data.

        Args:
            train_dataset: a `PackedDataset`, or plain data (`datasets.Dataset`, `IterableDataset`,
                list, path) of tokens or text. Plain data is packed at the start of `fit`; samples
                are cut at the model's longest sequence.
            val_dataset: the same; plain data is packed with the settings of the training data.
            collator: a `PackedCollator` with your options; default: one without options.
            num_workers: processes that read packs; with 0, the training process reads them.
            budget: tokens of a pack, for plain data.
            tokenizer: tokenizer for plain data of text.
            seed: determines the order of plain data; default: the seed of `seed_everything`, or 0.
            sequence_parallel: ranks that share the tokens of each pack.
            accumulation_steps: for manual optimization, the packs after which `training_step` takes
                an optimizer step; otherwise it is the Trainer's `accumulate_grad_batches`.
        """
        super().__init__()
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self._plain: dict[str, Any] | None = None
        """The settings to pack the training data with, until it is packed."""
        self.is_plain = check_plain(train_dataset, budget, "train_dataset")
        if self.is_plain:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
            self._plain = {"budget": budget, "tokenizer": tokenizer, "seed": seed}
        else:
            refuse_plain_settings(tokenizer=tokenizer, seed=seed)
        self.collator, self.num_workers = collator, num_workers
        self.sequence_parallel = sequence_parallel
        self._accumulation_steps = accumulation_steps
        self.loader: LightningPackedLoader | None = None
        self.val_loader: LightningEvaluationLoader | None = None
        self.checked_models: list[Any] = []
        """The models whose vocabularies and positions the batches are checked against."""
        self.saved_packs_per_step: int | None = None
        """Packs per optimizer step of the checkpoint that is resumed, until the next loader."""
        self.layers: str | None = None
        """The layers that train; before the start, those of the checkpoint that is resumed."""
        self._hide_validation()

    def setup(self, stage: str | None = None) -> None:
        """Pack plain data; the model's limits are known by now."""
        if self._plain is not None:
            module = None if self.trainer is None else self.trainer.lightning_module
            with suppress(ValueError):  # `configure_model` may create it later
                module = None if module is None else causal_lm(module)
            config = getattr(module, "config", None)
            self.train_dataset = pack_plain(self.train_dataset, config, **self._plain)
            self._plain = None
        if self.val_dataset is not None:
            self.val_dataset = pack_like(self.train_dataset, self.val_dataset)

    def _hide_validation(self) -> None:
        if self.val_dataset is None:  # otherwise Lightning would ask for a validation_step
            self.val_dataloader = super().val_dataloader

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._hide_validation()  # unpickling restores the method of the class

    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        size = self.accumulation(trainer)
        _check_accumulation(trainer, size)
        if self.loader is not None and self.loader.dataset is self.train_dataset:
            self.loader.rewind_to_trained()
        self.loader = LightningPackedLoader(
            self.train_dataset,
            self.collator,
            accumulation_steps=size,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            layout=self.layout(trainer),
        )
        self.loader.overfits = trainer.overfit_batches > 0
        self.loader.tracked = any(getattr(c, "tracks_packs", False) for c in trainer.callbacks)
        self.loader.saved_packs_per_step, self.saved_packs_per_step = (
            self.saved_packs_per_step,
            None,
        )
        if self.checked_models:
            check_first_batches(self.loader, *self.checked_models)
        return self.loader

    def accumulation(self, trainer: Any) -> int:
        """Return the packs per optimizer step and rank of a `trainer`'s module."""
        size = self._accumulation_steps
        if size is None:
            return trainer.accumulate_grad_batches
        if trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"accumulation_steps={size} is for manual optimization: pass "
                f"accumulate_grad_batches={size} to the Trainer instead"
            )
        return size

    def layout(self, trainer: Any) -> Layout:
        """Return the layout of this process, from a `trainer`'s mesh and model and the settings."""
        module = trainer.lightning_module or nn.Module()
        mesh = getattr(trainer.strategy, "device_mesh", None)
        return find_layout(module, mesh=mesh, sequence_parallel=self.sequence_parallel)

    def val_dataloader(self) -> Any:
        assert self.val_dataset is not None
        # The limit is needed to weigh the losses: each batch counts by its share of the packs read.
        limit = getattr(self.trainer, "limit_val_batches", None)
        self.val_loader = LightningEvaluationLoader(
            self.val_dataset,
            self.collator,
            limit if isinstance(limit, int) else None,
            None if self.trainer is None else self.layout(self.trainer),
        )
        if self.checked_models:
            self.val_loader.limits = ModelLimits.of(*self.checked_models)
        return self.val_loader


def _check_accumulation(trainer: Any, size: int) -> None:
    """Refuse settings with which Lightning would step in the middle of our optimizer steps."""
    limit = trainer.limit_train_batches
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
