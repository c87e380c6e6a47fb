"""`PackedAccelerateLoader`: packs, exact loss, checks and saved position in an Accelerate loop.

    loader = PackedAccelerateLoader(accelerator, dataset)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)   # a step's losses average to its token mean
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

    validation = loader.validation(held_out)            # the mean of its losses is the token mean

Accelerate's own `prepare` would dispatch batches from rank 0 and slice `cu_seq_lens` over ranks;
this loader is not a torch DataLoader, so `prepare` returns it unchanged. `save_state` and
`load_state` keep the data position in `nopad_data.json`; further loaders use `nopad_data_1.json`
and so on, in the order of their creation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import DistributedType, send_to_device
from torch import nn

from ...packing import Pack, PackedDataset
from ...runtime import Layout, find_layout, join_sequence_group, unwrap_peft
from ..banner import print_banner
from ..data.data_state import STATE_FILE, load_data_state, save_data_state
from ..data.loader import Batch, EvaluationLoader, PackedLoader
from ..data.plain_data import check_plain, pack_like, pack_plain, refuse_plain_settings
from ..layers import PreparedLayers, prepare_layers, sharding_obstacle, trained_layers
from ..loss.attached_loss import AttachedLoss, attach_loss, find_loss
from ..monitoring.finite_check import OWN_LOSS, FiniteCheck
from ..monitoring.preflight import (
    check_first_batches,
    check_run,
    describe_speedups,
    print_resumed,
)
from ..train_mode import ensure_train_mode


class PackedAccelerateLoader(PackedLoader, DataLoaderStateMixin):
    """The batches of this process, on its device, in step with Accelerate's gradient state.

    After `load_state` it continues at the saved position: do not use `skip_first_batches`.
    """

    _joined: Layout | None = None
    """The layout whose group of ranks that share rows was joined."""
    _sequence_group: Any = None
    _says_own_loss = True
    """Whether to explain, after the first batch, how to make a custom loss exact."""

    def __init__(
        self,
        accelerator: Accelerator,
        dataset: Any,
        collator: Callable[[Pack], Batch] | None = None,
        *,
        budget: int | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        layers: str = "auto",
        fp8: bool = False,
        check: bool = True,
        continue_on_nan: bool = False,
        sequence_parallel: int = 1,
        **options: Any,
    ):
        """Take device and accumulation steps from the accelerator.

        The exact loss, which needs no logits, is attached to the prepared model (`attach_loss`),
        unless one is attached already. A model in eval mode is put into training mode.

        Args:
            accelerator: the one that prepares model and optimizer.
            dataset: a `PackedDataset`, or plain data (`datasets.Dataset`, `IterableDataset`, list,
                path) of tokens or text. Plain data is packed; samples are cut at the longest
                sequence of the models prepared so far.
            collator: a `PackedCollator` with your options; default: one without options.
            budget: tokens of a pack, for plain data.
            tokenizer: tokenizer for plain data of text.
            seed: determines the order of plain data; default 0.
            layers: "compiled" (`compile_layers`), "stock", or "auto": compiled on a GPU where they
                can be, and the banner says why not. A resumed run keeps those of its checkpoint.
            fp8: run the large products of compiled layers in fp8 while training.
            check: before the first step, refuse runs that would train the prepared model wrongly.
            continue_on_nan: continue after a loss that is not finite, instead of raising
                `NonFiniteError`; `save_state` saves nothing while weights are not finite.
            sequence_parallel: ranks that share the tokens of each pack; also `sp_size` or `cp_size`
                of the accelerator's `ParallelismConfig`. Do not enter `maybe_context_parallel`.
            options: num_workers, drop_last; see `PackedLoader`.
        """
        _check_accelerator(accelerator)
        self.accelerator = accelerator
        super().__init__(
            self._packed(dataset, budget, tokenizer, seed),
            collator,
            accumulation_steps=accelerator.gradient_accumulation_steps,
            pin_memory=accelerator.device.type == "cuda",
            **options,
        )
        self.gradient_state, self._sequence_parallel = GradientState(), sequence_parallel
        self._layers, self._fp8, self._needs_check = layers, fp8, check
        self.prepared_layers: dict[int, PreparedLayers] = {}  # by id of a prepared model
        self.finite_check = FiniteCheck(continue_on_nan)
        self._guard_saves()
        _refuse_context_parallel(accelerator)
        index = _num_loaders(accelerator)
        accelerator.__dict__["nopad_num_loaders"] = index + 1
        self._state_file = STATE_FILE.replace(".", f"_{index}.") if index else STATE_FILE
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def _packed(self, data: Any, budget: Any, tokenizer: Any, seed: int | None) -> PackedDataset:
        if not check_plain(data, budget, "dataset"):
            refuse_plain_settings(tokenizer=tokenizer, seed=seed)
            return data
        config = next((model.config for model in self._causal_lms()), None)
        return pack_plain(data, config, budget=budget, tokenizer=tokenizer, seed=seed or 0)

    def __iter__(self) -> Iterator[Batch]:
        self._prepare_models()
        self._start_training()
        losses = [model.nopad_loss for model in self._causal_lms()]
        before, count, trains = self.accelerator.step, None, False
        self.begin()
        try:
            for number, batch in enumerate(super().__iter__()):
                count = self._align(number % self.accumulation_steps)
                for loss in losses if torch.is_grad_enabled() else ():
                    loss.token_losses = None
                try:
                    yield batch
                finally:  # `accumulate` counts batches that are trained, not those of a validation
                    trains |= self.accelerator.step != count
                self._add_losses(losses)
                if not (number + 1) % self.accumulation_steps:
                    self.finite_check.end_step(str(self.last_pack))
            self.finite_check.flush()
            count = None
        finally:
            self._leave(before, count if trains else None)

    def validation(self, dataset: Any, limit: int | None = None) -> EvaluationLoader:
        """Return the batches of a validation set: the mean of their losses is its token mean.

        The mean is over batches and ranks, independent of the accumulation. Every iteration starts
        from the beginning; `save_state` does not save its position.

            model.eval()
            with torch.no_grad():
                losses = torch.stack([model(**batch).loss for batch in validation])
            loss = accelerator.reduce(losses.mean(), "mean")
            model.train()

        Args:
            dataset: a `PackedDataset` with known lengths, or plain data, which is packed with the
                settings of the training data.
            limit: read at most this many packs per rank; the mean is over these packs.
        """
        return _ValidationLoader(self, pack_like(self.dataset, dataset), limit)

    def _prepare_models(self) -> None:
        """Attach the loss to the prepared models, and check them once."""
        self._place()
        self._join_group()
        for model in self._causal_lms():
            self._prepare_model(model)
        if self._needs_check:
            self._needs_check = False
            self._check()
        self.layers = trained_layers(self.prepared_layers.values(), self.layers)

    def _align(self, done: int) -> int:
        """Make Accelerate sync the gradients with the last batch of a step, and only then.

        Another loader may have been iterated since the last batch, and `load_state` restores the
        count of a run that may have accumulated differently.

        done: batches of the step that were issued before. Returns Accelerate's count of batches,
        which is never 0: it is 0 after the last batch of the data.
        """
        size, now = self.accumulation_steps, self.accelerator.gradient_accumulation_steps
        if now != size:
            raise ValueError(
                f"gradient_accumulation_steps={now}, but this loader groups packs in steps of "
                f"{size}: pass it to the Accelerator before creating the loader, and do not "
                "change it"
            )
        self.accelerator.step = size + done
        if self.gradient_state.active_dataloader is not self:
            self.end()
            self.gradient_state._add_dataloader(self)
        return size + done

    def _leave(self, before: int, count: int | None) -> None:
        """Restore the batch count of the surrounding loop; note a step that was left unfinished.

        before: the count when the iteration began.
        count: that of the last batch when it was issued; None if the data has ended, or nothing was
            trained.
        """
        if self.gradient_state.active_dataloader is self:  # otherwise another one counts by now
            size, now = self.accumulation_steps, self.accelerator.step
            if count is not None and now % size:
                self.accelerator.__dict__["nopad_left_step"] = True
            if count == now == 2 * size - 1:  # the step was issued, its last batch not trained
                self._state = self._state_before
            self.accelerator.step = before
        self.end()

    def _find_layout(self) -> Layout:
        # Before `prepare` no model is known: then all that are alive count.
        models = nn.ModuleList(self.accelerator._models) if self.accelerator._models else None
        return find_layout(models, sequence_parallel=self._sequence_parallel)

    def _join_group(self) -> None:
        """Join the ranks that share rows with this one, once per layout; all ranks call it."""
        if self._joined is not self.layout:
            assert self.layout is not None
            self._joined, self._sequence_group = self.layout, join_sequence_group(self.layout)

    def _start_training(self) -> None:
        """Put models into training mode, once: afterwards the loop decides on their mode."""
        if not torch.is_grad_enabled():  # a loop that validates, in eval mode
            return
        self._discard_left_step()
        started = self.accelerator.__dict__.setdefault("nopad_started", WeakSet())
        for model in self._causal_lms():
            if model not in started:
                started.add(model)
                ensure_train_mode(model)

    def _discard_left_step(self) -> None:
        """Discard the gradients of an unfinished step: its packs are trained again."""
        if not self.accelerator.__dict__.pop("nopad_left_step", False):
            return
        kind = self.accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ValueError(
                f"the last loop was left inside an optimizer step, and {kind.value} still holds "
                "its gradients: leave loops after a step, where accelerator.sync_gradients is True"
            )
        for model in self.accelerator._models:
            model.zero_grad()  # the optimizer's does nothing inside a step

    def _add_losses(self, losses: list[AttachedLoss]) -> None:
        """Add the losses of the batch that was trained last to the check."""
        found = [loss.token_losses for loss in losses if loss.token_losses is not None]
        for token_losses in found:
            self.finite_check.add(token_losses)
        if self._says_own_loss and losses and torch.is_grad_enabled():
            self._says_own_loss = False
            if not found:
                print_banner([f"the loss is not that of model(**batch): {OWN_LOSS}"])

    def _guard_saves(self) -> None:
        """Make `save_state` skip weights that are not finite, before it deletes older checkpoints.

        A hook would be too late: for `total_limit`, Accelerate deletes first.
        """
        save = self.accelerator.save_state

        @wraps(save)
        def save_finite(*args: Any, **kwargs: Any) -> Any:
            place = str(self.last_pack or "no step")
            models = self.accelerator._models
            finite = [self.finite_check.may_save(model, place) for model in models]
            return save(*args, **kwargs) if all(finite) else None

        self.accelerator.save_state = save_finite

    def _causal_lms(self) -> list[Any]:
        models = (self.accelerator.unwrap_model(model) for model in self.accelerator._models)
        return [lm for lm in map(unwrap_peft, models) if hasattr(lm, "get_output_embeddings")]

    def _prepare_model(self, model: Any) -> None:
        """Attach the loss and prepare the layers, unless it was done."""
        if id(model) not in self.prepared_layers or find_loss(model) is None:
            loss = find_loss(model) or attach_loss(model)
            if loss.row_shards is None:
                loss.share_rows(self._sequence_group)
            self.prepared_layers[id(model)] = prepare_layers(
                model,
                self.accelerator.device,
                self._layers,
                fp8=self._fp8,
                saved=self.layers,
                obstacle=sharding_obstacle(self.accelerator),
                layout=self.layout,
            )

    def _check(self) -> None:
        for model in self._causal_lms():
            with self.accelerator.autocast():
                banner = check_run(model, self.dataset, self.collator, self.layout)
            line = describe_speedups(model.nopad_loss, self.prepared_layers[id(model)])
            print_banner([*banner, line])
        if models := self._causal_lms():
            check_first_batches(self, *models)

    @property
    def worker_init_fn(self) -> Any:
        """Raise: only `skip_first_batches` reads it, to rebuild a DataLoader from its settings."""
        raise ValueError(
            "skip_first_batches does not apply to packs: after load_state the loader continues by "
            "itself with the packs that were not trained"
        )

    def to_device(self, batch: Batch) -> Batch:
        moved: Any = send_to_device(batch, self.accelerator.device, non_blocking=True)
        return moved

    def on_step_end(self, is_last: bool) -> None:
        self.end_of_dataloader = is_last

    def _save(self, models: list, weights: list, folder: str) -> None:
        self.layers = trained_layers(self.prepared_layers.values(), self.layers)
        save_data_state(self, Path(folder), name=self._state_file)

    def _load(self, models: list, folder: str) -> None:
        saved = len(list(Path(folder).glob(STATE_FILE.replace(".", "*."))))
        created = _num_loaders(self.accelerator)
        if saved and saved != created:
            raise ValueError(
                f"{folder} holds the positions of {saved} loaders, but {created} were created with "
                "this Accelerator: create as many, in the same order, before load_state, or start "
                "with a new Accelerator"
            )
        load_data_state(self, Path(folder), self._state_file)
        print_resumed(folder, self.dataset)


class _ValidationLoader(EvaluationLoader):
    """The batches of a validation set, for the models and the device of a training loader."""

    def __init__(self, training: PackedAccelerateLoader, dataset: PackedDataset, limit: int | None):
        self._training = training
        super().__init__(dataset, training.collator, limit, training._find_layout())

    def __iter__(self) -> Iterator[Batch]:
        self._training._prepare_models()
        self.limits = self._training.limits
        return super().__iter__()

    def to_device(self, batch: Batch) -> Batch:
        return self._training.to_device(batch)


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings of Accelerate's own loader, which would have no effect."""
    agreed = {"split_batches": (False,), "dispatch_batches": (None, False), "even_batches": (True,)}
    for name, values in agreed.items():
        value = getattr(accelerator, name)
        if value not in values:
            raise ValueError(
                f"{name}={value} does not apply to packs: each rank reads its own; omit it in "
                "DataLoaderConfiguration"
            )


def _refuse_context_parallel(accelerator: Accelerator) -> None:
    """Make `maybe_context_parallel` raise where it would cut packs a second time."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "maybe_context_parallel would attend across the documents of a pack: omit it; nopad's "
            "loss spreads packs over the ranks of cp_size"
        )

    if getattr(accelerator.parallelism_config, "cp_size", 1) > 1:
        accelerator.maybe_context_parallel = refuse


def _num_loaders(accelerator: Accelerator) -> int:
    """Return how many packed loaders this accelerator has."""
    return accelerator.__dict__.get("nopad_num_loaders", 0)
