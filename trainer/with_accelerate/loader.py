"""Packs in an Accelerate loop: one line for the loader, nothing else changes.

    loader = PackedAccelerateLoader(accelerator, dataset)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)      # the exact token mean of the step
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

Accelerate's own `prepare` would dispatch batches from rank 0 and slice `cu_seq_lens` over ranks;
this loader is not a torch DataLoader, so `prepare` hands it back untouched. `save_state` and
`load_state` carry the data position in a file of our own, `nopad_data.json`; of further loaders,
in `nopad_data_1.json` and so on, in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from ...packing import Pack, PackedDataset
from ...runtime import unwrap_peft
from ..data.data_state import STATE_FILE, load_data_state, save_data_state
from ..data.loader import Batch, PackedLoader
from ..monitoring.preflight import check_run, guard, print_banner

_made: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""How many loaders each accelerator has."""


class PackedAccelerateLoader(PackedLoader, DataLoaderStateMixin):
    """The batches of this process, on its device, in step with Accelerate's gradient state.

    After `load_state` it goes on by itself: leave `skip_first_batches` out.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dataset: PackedDataset,
        collator: Callable[[Pack], Batch] | None = None,
        *,
        check: bool = True,
        **options: Any,
    ):
        """Take the accelerator's settings.

        check: before the first step, refuse what would train the prepared model wrongly.
        options: num_workers, last_window; see `PackedLoader`.
        """
        super().__init__(
            dataset,
            collator,
            accumulation=accelerator.gradient_accumulation_steps,
            pin_memory=accelerator.device.type == "cuda",
            **options,
        )
        self.accelerator = accelerator
        self.gradient_state = GradientState()
        self._to_check = check
        number = _made.get(accelerator, 0)
        _made[accelerator] = number + 1
        self._file = STATE_FILE.replace(".", f"_{number}.") if number else STATE_FILE
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def __iter__(self) -> Iterator[Batch]:
        if self._to_check:
            self._to_check = False
            self._check()
        # A load brings the count of micro-batches of a run that may have accumulated otherwise.
        self.accelerator.step = 0
        self.begin()
        try:
            yield from super().__iter__()
        finally:
            self.end()

    def _check(self) -> None:
        for prepared in self.accelerator._models:
            model = unwrap_peft(self.accelerator.unwrap_model(prepared))
            if hasattr(model, "get_output_embeddings"):
                with self.accelerator.autocast():
                    print_banner(check_run(model, self.dataset, self.collator))
                guard(self, model)

    def place(self, batch: Batch) -> Batch:
        moved: Any = send_to_device(batch, self.accelerator.device, non_blocking=True)
        return moved

    def on_step_end(self, is_last: bool) -> None:
        self.end_of_dataloader = is_last

    def _save(self, models: list, weights: list, folder: str) -> None:
        save_data_state(self, Path(folder), name=self._file)

    def _load(self, models: list, folder: str) -> None:
        saved = len(list(Path(folder).glob(STATE_FILE.replace(".", "*."))))
        if saved and saved != _made[self.accelerator]:
            raise ValueError(
                f"{folder} holds the positions of {saved} loaders, and {_made[self.accelerator]} "
                "were made with this Accelerator: make as many, in the same order, before "
                "load_state, or begin with a new Accelerator"
            )
        load_data_state(self, Path(folder), self._file)
