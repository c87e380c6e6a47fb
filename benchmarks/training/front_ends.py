"""Packed training as users write it: HF Trainer, Lightning and Accelerate, beside the stock ones.

Weights are fp32 and trained under bf16 autocast with clipping and torch's fused AdamW. The peer is
the library's own trainer with HF's flattening collator, flash-attn 2 and liger-kernel, on the same
packs. A front end takes a run and a model, trains `run.steps` optimizer steps, and calls
`run.step_ended()` after each.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from nopad.packing import Pack, PackedDataset
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

LEARNING_RATE = 1e-5


@dataclass
class Run:
    """One timed training: its data, and the clock that starts after the warm-up."""

    documents: list[np.ndarray]
    budget: int
    warmup_steps: int
    timed_steps: int
    accumulation: int = 1
    bf16: bool = True
    gradient_checkpointing: bool = False
    workers: int = 1
    """Processes that load the data of the HF Trainer."""
    losses: list[float] = field(default_factory=list)
    profile: Any = None
    """A torch.profiler.profile of the timed steps, or None."""
    first_step_s: float = 0.0
    """From the start of the training to the end of its first step."""
    phases_s: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds of the HF Trainer before its first step, by what it did: see `Clock`."""
    _ended: int = 0
    _start: float = 0.0
    _created: float = field(default_factory=time.perf_counter)

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.timed_steps

    def dataset(self, epochs: int | None = None) -> PackedDataset:
        rows = [{"input_ids": ids} for ids in self.documents]
        return PackedDataset(rows, budget=self.budget, epochs=epochs, add_eos=False)

    def packs(self) -> list[Pack]:
        return list(islice(self.dataset(), self.steps * self.accumulation))

    def phase_ended(self, name: str) -> None:
        self.phases_s[name] = time.perf_counter() - self._created - sum(self.phases_s.values())

    def step_ended(self) -> None:
        self._ended += 1
        if self._ended == 1:
            _sync()
            self.phase_ended("first step")
            self.first_step_s = sum(self.phases_s.values())
        if self._ended == self.warmup_steps:
            _sync()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            if self.profile is not None:
                self.profile.start()
            self._start = time.perf_counter()
        if self._ended == self.steps:
            _sync()
            self.seconds = time.perf_counter() - self._start
            if self.profile is not None:
                self.profile.stop()

    def report(self) -> dict[str, Any]:
        if self._ended != self.steps:
            raise RuntimeError(f"the trainer took {self._ended} steps instead of {self.steps}")
        timed = self.packs()[self.warmup_steps * self.accumulation :]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            "tokens_per_second": sum(len(pack.tokens) for pack in timed) / self.seconds,
            "peak_GB": peak / 1e9,
            "step_ms": 1e3 * self.seconds / self.timed_steps,
            "steps": self.timed_steps,
            "first_step_s": self.first_step_s,
            "phases_s": self.phases_s,
            "losses": [round(loss, 4) for loss in self.losses],
        }


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _PackRows(Dataset):
    """The packs as rows of a map-style data set, for stock trainers."""

    def __init__(self, packs: list[Pack]):
        self.packs = packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Pack:
        return self.packs[index]


class FlatteningCollator:
    """HF's flattening collator, applied to the samples of one pack."""

    def __init__(self) -> None:
        self.collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def __call__(self, pack: Any) -> dict[str, Any]:
        pack = pack[0] if isinstance(pack, list) else pack
        cuts = pack.cu_seqlens[1:-1]
        pairs = zip(np.split(pack.tokens, cuts), np.split(pack.labels, cuts), strict=True)
        rows = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in pairs]
        return {**self.collator(rows), "use_cache": False}


class Clock(TrainerCallback):
    """Tells a run of the end of each phase and step, and of the loss."""

    def __init__(self, run: Run):
        self.run = run

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.phase_ended("construction")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.phase_ended("start check")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.step_ended()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.run.losses.append(float(logs["loss"]))


def hf_arguments(run: Run, folder: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        bf16=run.bf16,
        use_cpu=not torch.cuda.is_available(),
        max_steps=run.steps,
        gradient_accumulation_steps=run.accumulation,
        gradient_checkpointing=run.gradient_checkpointing,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=run.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=run.workers,
        **options,
    )


def hf_nopad(run: Run, model: Any, before: Any = None, **options: Any) -> None:
    """before: called with the model first."""
    from nopad import PackedTrainer

    if before is not None:
        before(model)
    with TemporaryDirectory() as folder:
        args = hf_arguments(run, folder)
        data = run.dataset()
        trainer = PackedTrainer(model, args, train_dataset=data, callbacks=[Clock(run)], **options)
        trainer.train()


def hf_stock(run: Run, model: Any) -> None:
    with TemporaryDirectory() as folder:
        args = hf_arguments(
            run,
            folder,
            per_device_train_batch_size=1,
            use_liger_kernel=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )
        rows, collator = _PackRows(run.packs()), FlatteningCollator()
        Trainer(model, args, collator, rows, callbacks=[Clock(run)]).train()


def accelerate_nopad(run: Run, model: Any, **options: Any) -> None:
    from accelerate import Accelerator
    from nopad import PackedAccelerateLoader

    accelerator = Accelerator(
        mixed_precision="bf16" if run.bf16 else "no", gradient_accumulation_steps=run.accumulation
    )
    model, optimizer = accelerator.prepare(model, adamw(model))
    batches = PackedAccelerateLoader(accelerator, run.dataset(), num_workers=1, **options)
    _accelerate_loop(run, accelerator, model, optimizer, batches)


def accelerate_stock(run: Run, model: Any) -> None:
    from accelerate import Accelerator

    apply_liger(model)
    accelerator = Accelerator(
        mixed_precision="bf16" if run.bf16 else "no", gradient_accumulation_steps=run.accumulation
    )
    model, optimizer, batches = accelerator.prepare(model, adamw(model), _stock_loader(run))
    _accelerate_loop(run, accelerator, model, optimizer, batches)


def _accelerate_loop(run: Run, accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    if run.gradient_checkpointing:
        accelerator.unwrap_model(model).gradient_checkpointing_enable()
    model.train()
    loss = None
    for batch in islice(batches, run.steps * run.accumulation):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.step_ended()
    assert loss is not None
    run.losses.append(loss.item())


def lightning_nopad(run: Run, model: Any, **options: Any) -> None:
    from nopad import PackedCallback, PackedDataModule

    packs = PackedDataModule(run.dataset(), num_workers=1)
    callback = PackedCallback(packs, **options)
    _lightning_fit(run, model, [callback], packs)


def lightning_stock(run: Run, model: Any) -> None:
    apply_liger(model)
    _lightning_fit(run, model, [], _stock_loader(run))


def _lightning_fit(run: Run, model: Any, callbacks: list[Any], batches: Any) -> None:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            # Lightning clips no gradients for a fused optimizer.
            return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop._should_accumulate():
                return
            run.step_ended()
            if trainer.global_step == run.steps:
                run.losses.append(float(outputs["loss"]))

    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    with TemporaryDirectory() as folder:
        pl.Trainer(
            precision="bf16-mixed" if run.bf16 else "32-true",
            max_steps=run.steps,
            accumulate_grad_batches=run.accumulation,
            gradient_clip_val=1.0,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[*callbacks, Clock()],
        ).fit(Module(), batches)


def _stock_loader(run: Run) -> DataLoader:
    rows = _PackRows(run.packs())
    return DataLoader(
        rows, batch_size=1, collate_fn=FlatteningCollator(), num_workers=1, pin_memory=True
    )


def adamw(model: Any) -> torch.optim.Optimizer:
    fused = next(model.parameters()).is_cuda or torch.cuda.is_available()
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def apply_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
