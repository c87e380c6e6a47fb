"""Packs in the HF Trainer, and in any trainer made of it, TRL's SFTTrainer among them.

    class PackedTrainer(Packed, Trainer): pass          # defined here
    class PackedSFTTrainer(Packed, SFTTrainer): pass    # two lines of yours

    PackedTrainer(model, args, train_dataset=PackedDataset(...)).train(resume_from_checkpoint=True)

The training loop is the stock one. What changes: the loader hands out whole packs in whole
accumulation windows, the loss is exact and takes no memory for logits, checkpoints hold the data
position, and the log tells fill, rates and MFU.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from ...packing import PackedDataset
from ...runtime import barrier, rank, sum_over_ranks, unwrap_peft
from ..checkpoint_manifest import latest_intact_checkpoint, remove_manifest, write_manifest
from ..data.data_state import load_data_state, save_data_state
from ..data.loader import Batch, EvaluationLoader, PackedLoader
from ..loss.attached_loss import attach_loss
from ..monitoring.preflight import check_run, guard, print_banner
from ..monitoring.throughput import Meter, away
from .stopping import StopCallback

_Base = Trainer if TYPE_CHECKING else object


class PackedTrainerMixin(_Base):
    """Mix this in before a Trainer whose `train_dataset` is a `PackedDataset`."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: PackedDataset | None = None,
        *,
        z_loss: float = 0.0,
        check: bool = True,
        **kwargs: Any,
    ):
        """Take what the trainer takes; your arguments stay as they are, `self.args` is a copy.

        With `max_steps` the data goes on where it stands. With `num_train_epochs` it begins at its
        beginning, and its `epochs` are that many.

        z_loss: weight of the squared log-normalizer in the loss.
        check: refuse, before the first step, what would train wrongly.
        """
        args = copy(args) if args is not None else TrainingArguments()
        if not isinstance(train_dataset, PackedDataset):
            raise ValueError(
                f"train_dataset is a {type(train_dataset).__name__}: wrap your data in "
                "nopad.packing.PackedDataset, or use the trainer without Packed"
            )
        smoothing = _settle(args, train_dataset)
        super().__init__(model, args, data_collator, self._stand_in(train_dataset, args), **kwargs)
        self.train_dataset = train_dataset
        self.packed_collator = data_collator
        model = self.accelerator.unwrap_model(self.model)
        self.model_loss = attach_loss(model, label_smoothing=smoothing, z_loss=z_loss)
        if self.compute_metrics is not None:
            self.model_loss.keep_logits()
        self.model_accepts_loss_kwargs = True  # the attached loss does, whatever the model did
        self.packed_check = check
        self._loader: PackedLoader | None = None
        self._evaluated: dict[PackedDataset, EvaluationLoader] = {}
        self._meter: Meter | None = None
        self._resume: Path | None = None

    def _stand_in(self, data: PackedDataset, args: Any) -> Any:
        """What the trainer's __init__ looks at: TRL's takes data sets of one kind only."""
        files = (sys.modules[kind.__module__] for kind in type(self).__mro__)
        trl: Any = next((file for file in files if file.__name__.startswith("trl.")), None)
        if trl is None:
            return data
        if not hasattr(args, "dataset_kwargs"):
            raise ValueError(f"args is {type(args).__name__}, TRL's trainer: give an SFTConfig")
        if getattr(args, "loss_type", "nll") not in ("nll", "chunked_nll"):
            raise ValueError(
                f"loss_type={args.loss_type!r}: the loss of packs is the exact mean of 'nll'; "
                "leave it out, or use the trainer without Packed"
            )
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        return trl.Dataset.from_dict({"input_ids": [[0, 1]]})

    def _reject_skip_prepare_without_labels(self, datasets: dict[str, Any], *args: Any) -> None:
        # TRL looks at the columns of what it evaluates, and packs have none.
        rows = {n: data for n, data in datasets.items() if not isinstance(data, PackedDataset)}
        super()._reject_skip_prepare_without_labels(rows, *args)  # pyright: ignore[reportAttributeAccessIssue]

    def get_train_dataloader(self) -> Any:
        self._loader = PackedLoader(
            self.train_dataset,
            self.packed_collator,
            accumulation=self.args.gradient_accumulation_steps,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            with_items=False,
        )
        if self._resume is not None:
            load_data_state(self._loader, self._resume)
        model = unwrap_peft(self.accelerator.unwrap_model(self.model))
        if self.packed_check:
            with self.accelerator.autocast():
                print_banner(check_run(model, self.train_dataset, self._loader.collator))
            guard(self._loader, model)
        self._meter = Meter.of(self._loader, model)
        return self._loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        sets: Any = self.eval_dataset
        data = sets if eval_dataset is None else eval_dataset
        if isinstance(data, str):  # one of several
            data = sets[data]
        if not isinstance(data, PackedDataset):
            return super().get_eval_dataloader(eval_dataset)
        if data not in self._evaluated:  # what it counts is found once
            self._evaluated[data] = EvaluationLoader(data, self.packed_collator)
        return self._evaluated[data]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if isinstance(test_dataset, PackedDataset):
            return self.get_eval_dataloader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(latest_intact_checkpoint(Path(str(self.args.output_dir))))
        self._resume = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # the trainer tells its callbacks of no exception
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StopCallback):
                    callback.request.release()

    def get_batch_samples(self, *given: Any, **named: Any):
        # A resumed run that is done already would take a step more: its loop looks after steps.
        done = self.state.global_step >= self.state.max_steps
        return ([], None) if done else super().get_batch_samples(*given, **named)

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._loader is not None and self._meter is not None:
            info, _ = self._loader.handed_out.popleft()
            self._meter.add(info, inputs["labels"], self.model_loss.token_losses)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with away():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        only_losses = self.args.prediction_loss_only
        with away(), nullcontext() if only_losses else self.model_loss.keeping_logits():
            return super().predict(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any):
        # Straight to the stock one: trainers in between take their loss from logits.
        return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        if batch_samples and "num_items_in_batch" in batch_samples[0]:
            return None  # an evaluation batch brings its own
        if not batch_samples or "loss_weights" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        weight = sum(float(batch["loss_weights"].sum()) for batch in batch_samples)
        return sum_over_ranks(weight).clamp(min=1).float().to(device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._meter is not None and self._loader is not None:
            # The trainer takes packs for samples, and the whole run for one epoch.
            self.state.epoch = self._loader.epochs() or self.state.epoch
            if "train_runtime" in logs:
                samples = self._meter.read()["samples_seen"]
                logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
            if "loss" in logs:
                logs = {**logs, **{f"pack/{k}": v for k, v in self._meter.read().items()}}
                self._meter.reset()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self._get_output_dir(trial=trial)
        folder = Path(run) / f"checkpoint-{self.state.global_step}"
        if rank() == 0:
            remove_manifest(folder)
        barrier()
        if self._loader is not None:
            save_data_state(self._loader, folder)
        # Older ones go when the new one is whole: were it cut short, none might be left.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        barrier()
        if rank() == 0:
            write_manifest(folder)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run, limit, best_model_checkpoint=best, use_mtime=True)


class PackedTrainer(PackedTrainerMixin, Trainer):
    """The HF Trainer on packs."""


def _settle(args: TrainingArguments, data: PackedDataset) -> float:
    """Set what packs need in the arguments; return the label smoothing, which is ours to do."""
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs would cut packs in pieces (DataParallel): start "
            "one process for each with accelerate launch or torchrun, or show it one GPU only"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True: a batch is one pack, whatever its size was meant to be; "
            "leave it out and lower the data's budget where memory ends"
        )
    args.remove_unused_columns = False
    args.per_device_train_batch_size = 1  # a batch is one pack, and is counted as that
    args.ignore_data_skip = True  # the data state does it, without replaying
    args.average_tokens_across_devices = True  # a mean of the ranks' means is not exact
    smoothing, args.label_smoothing_factor = args.label_smoothing_factor, 0.0
    if args.max_steps <= 0:
        args.max_steps = _steps(args, data)
    return smoothing


def _steps(args: TrainingArguments, data: PackedDataset) -> int:
    """Count the steps of `num_train_epochs`, and have the data begin with the first of them."""
    if not 0 < args.num_train_epochs < math.inf:
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs}: it needs to be more than 0 and to end, or "
            "else say max_steps="
        )
    if data.lengths is None:
        raise ValueError(
            "a stream's packs cannot be counted before it was read: say max_steps=, how many "
            "steps to train, in the arguments"
        )
    data.epochs = math.ceil(args.num_train_epochs)
    data.rewind()
    *whole, last = (data.count(epoch) for epoch in range(data.epochs))
    part = args.num_train_epochs - len(whole)  # of the last epoch
    per_rank = math.ceil((sum(whole) + part * last) / args.world_size)
    return math.ceil(per_rank / args.gradient_accumulation_steps)
