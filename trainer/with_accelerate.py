"""Packs in an Accelerate loop: one line for the loader, nothing else changes.

    loader = AcceleratePacks(accelerator, dataset)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)      # the exact token mean of the step
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

Accelerate's own `prepare` would dispatch batches from rank 0 and slice `cu_seq_lens` over ranks;
this loader is not a torch DataLoader, so `prepare` hands it back untouched. `save_state` and
`load_state` carry the data position in a file of our own, `nopad_data.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import gather_object, send_to_device

from ..packing import Pack, PackedDataset
from ..packing.state_file import read_state, write_state
from .loader import PackedLoader, PackInfo

STATE_FILE = "nopad_data.json"


class AcceleratePacks(PackedLoader, DataLoaderStateMixin):
    """The batches of this process, on its device, in step with Accelerate's gradient state."""

    _is_accelerate_prepared = True

    def __init__(
        self,
        accelerator: Accelerator,
        dataset: PackedDataset,
        collator: Callable[[Pack], dict[str, Any]] | None = None,
        *,
        num_workers: int = 0,
    ):
        super().__init__(
            dataset,
            collator,
            accumulation=accelerator.gradient_accumulation_steps,
            num_workers=num_workers,
            pin_memory=accelerator.device.type == "cuda",
        )
        self.accelerator = accelerator
        self.gradient_state = GradientState()
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin()
        try:
            yield from super().__iter__()
        finally:
            self.end()

    def count(self, infos: list[PackInfo]) -> torch.Tensor:
        mine = torch.tensor(sum(info.counted for info in infos), device=self.accelerator.device)
        total = self.accelerator.reduce(mine, reduction="sum")
        return total.clamp(min=1) / (self.accumulation * self.accelerator.num_processes)

    def place(self, batch: dict[str, Any]) -> dict[str, Any]:
        return send_to_device(batch, self.accelerator.device, non_blocking=True)

    def on_step_end(self, is_last: bool) -> None:
        self.end_of_dataloader = is_last

    def _save(self, models: list, weights: list, folder: str) -> None:
        """Gather what only single ranks know, on every rank, and write it once."""
        packs = gather_object([self.stepped]) if self.stepped else []
        if self.accelerator.is_main_process:
            state = self.dataset.state_after(packs) if packs else self.dataset.state_dict()
            write_state(Path(folder) / STATE_FILE, state)
        self.accelerator.wait_for_everyone()

    def _load(self, models: list, folder: str) -> None:
        self.dataset.load_state_dict(read_state(Path(folder) / STATE_FILE))
