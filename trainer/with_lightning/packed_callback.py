"""`PackedCallback` of Lightning: exact loss, checks and saved state; `training_step` stays yours.

    data = PackedDataModule(PackedDataset(...), num_workers=2)
    Trainer(callbacks=[PackedCallback(data)], accumulate_grad_batches=4, ...).fit(module, data)

    def training_step(self, batch, _):
        return self.model(**batch).loss         # the exact token mean, over accumulation and ranks

The loss of a batch is its share of the step's loss; the mean of the step over all ranks is logged
and shown in the progress bar as `train/loss`. A custom loss is exact too if it is the sum of token
losses divided by `batch["num_items_in_batch"]`. Lightning would save the state of rank 0's loader,
which is one batch ahead. Instead, the callback saves the state after the last trained batch, merged
over ranks, and the random states of every rank.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...runtime import (
    gather_rng_states,
    join_sequence_group,
    load_rng_states,
    preserve_rng,
    rng_states,
    unwrap_peft,
)
from ..banner import print_banner
from ..data.data_state import LAYERS, PACKS_PER_STEP, gather_data_state, restore_draws
from ..data.loader import PackedLoader, PackInfo
from ..layers import PreparedLayers, prepare_layers, trained_layers
from ..loss.attached_loss import AttachedLoss, attach_trainer_loss
from ..monitoring.finite_check import DIVERGED, OWN_LOSS, FiniteCheck, check_weights
from ..monitoring.preflight import (
    check_run,
    describe_speedups,
    print_resumed,
)
from ..monitoring.stream_end import is_stream_end, print_stream_end, print_unread_stream
from ..monitoring.throughput import ThroughputMeter, tracker_tags
from ..train_mode import ensure_train_mode
from .data_module import LightningPackedLoader, PackedDataModule
from .hooks import causal_lm, check_when_packed, pl, pretrained_models, trained_lms

DATA_KEY, ACCUMULATION_KEY, RNG_KEY = "nopad_data", "nopad_accumulation", "nopad_random"
"""nopad's keys in Lightning checkpoints."""
GUARD = "nopad_finite_check"
"""Attribute of a trainer that holds the check before its saves."""


class PackedCallback(pl.Callback):
    """Attach the exact loss, check the run, save data and random states, log throughput."""

    tracks_packs = True
    """This callback reports to the loader which batches were trained on."""

    def __init__(
        self,
        data: PackedDataModule,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        layers: str = "auto",
        fp8: bool = False,
        check: bool = True,
        continue_on_nan: bool = False,
    ):
        """Take the options of the loss.

        Args:
            data: the data module whose packs are trained on.
            label_smoothing: fraction of each label that is spread over the vocabulary.
            z_loss: weight of the squared log-normalizer in the loss.
            layers: "compiled" (`compile_layers`), "stock", or "auto": compiled on a GPU where they
                can be, and the banner says why not. A resumed run keeps those of its checkpoint.
            fp8: run the large products of compiled layers in fp8 while training.
            check: before the first step, refuse runs that would train wrongly.
            continue_on_nan: continue after a loss that is not finite, instead of raising
                `NonFiniteError`; weights that are not finite are not saved.
        """
        self.data, self.check, self._layers, self._fp8 = data, check, layers, fp8
        self.finite_check = FiniteCheck(continue_on_nan)
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.meter = ThroughputMeter()
        self._measured_loader: LightningPackedLoader | None = None
        self._prepared: dict[Any, AttachedLoss] = {}
        """The loss of each language model that is trained."""
        self.prepared_layers: dict[Any, PreparedLayers] = {}
        """The layers that train, for each of these models."""
        self._frozen_checks: list[Any] = []
        """Hooks that check the other models when they get packs."""
        self._manual_steps: ManualSteps | None = None
        self._said_own_loss = False
        self._labels: Tensor | None = None
        """Labels of the current batch: a `training_step` may remove them."""
        self._rng_states: list[list[Tensor]] | None = None
        """Random states of a checkpoint, until the training starts."""
        self._resumed_state: dict = {}
        """The data state of the checkpoint."""
        self._step_rng: list[Tensor] | None = None
        """Inside a step, the random states at its start: a checkpoint holds complete steps only."""
        self._micro_losses: list[Tensor] = []
        """Losses of the micro-batches since the last step; Lightning has divided them already."""
        self._aux_losses: list[Tensor] = []
        """Auxiliary losses of the same micro-batches, where the model has one."""
        self._validation = ExitStack()
        self._shows_total = False
        """Whether the progress bar shows the total of the current epoch."""
        self._sequence_group: Any = None
        self._max_steps: int | None = None
        """The trainer's `max_steps`, once the end of a stream has lowered it."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _refuse_batch_size_finder(trainer)
        if stage == "fit":
            self._rng_states = self._step_rng = None
            if self._max_steps is not None:  # an earlier `fit` ended with its stream
                trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None
            # First, so that a callback that raises finds the data state in step with the weights.
            trainer.callbacks = sorted(trainer.callbacks, key=lambda other: other is not self)
            _guard_saves(trainer, self.finite_check)
        self._prepared.clear()
        if stage != "predict" and (stage != "fit" or pretrained_models(pl_module)):
            self._prepare_models(trainer, pl_module)

    def _prepare_models(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Attach the loss, before the models are wrapped; once to each."""
        if self._sequence_group is None:
            self._sequence_group = join_sequence_group(self.data.layout(trainer))
        for model in trained_lms(pl_module):
            if model not in self._prepared:
                loss = attach_trainer_loss(model, self.options, self._sequence_group)
                self._prepared[model] = loss

    def _prepare_layers(self, trainer: Any) -> None:
        """Compile the layers or not, as the checkpoint did that is resumed."""
        kind = type(trainer.strategy).__name__.removesuffix("Strategy")
        shards = kind in ("FSDP", "DeepSpeed")
        for model in self._prepared:
            if model not in self.prepared_layers:
                self.prepared_layers[model] = prepare_layers(
                    model,
                    trainer.strategy.root_device,
                    self._layers,
                    fp8=self._fp8,
                    saved=self.data.layers,
                    obstacle=f"{kind} changes the weights of layers" if shards else "",
                    layout=self.data.layout(trainer),
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._prepare_models(trainer, pl_module)  # those made in `configure_model`
        self._prepare_layers(trainer)
        for model in self._prepared:
            ensure_train_mode(model)
        if self.check:
            with trainer.precision_plugin.forward_context():
                for number, (model, loss) in enumerate(self._prepared.items()):
                    banner = self._check_model(trainer, model)
                    shown = banner[:1] if number else banner  # the data is the same
                    speedups = describe_speedups(loss, self.prepared_layers[model])
                    print_banner([*shown, speedups])
            self._check_others_when_packed(trainer, pl_module)
            self.data.checked_models = list(self._prepared)
        if trainer.ckpt_path is not None and self._rng_states is not None:
            print_resumed(trainer.ckpt_path, self.data.train_dataset)

    def _check_model(self, trainer: Any, model: Any) -> list[str]:
        layout = self.data.layout(trainer)
        return check_run(model, self.data.train_dataset, self.data.collator, layout)

    def _check_others_when_packed(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Check models that are not trained, such as a teacher, once they get a pack."""

        def check(model: Any) -> None:
            with preserve_rng():
                print_banner(self._check_model(trainer, model)[:1])

        for wrapped in pretrained_models(pl_module):
            model = unwrap_peft(wrapped)
            if model not in self._prepared:
                self._frozen_checks.append(check_when_packed(wrapped, partial(check, model)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for handle in self._frozen_checks:
            handle.remove()
        self._frozen_checks.clear()
        if self._manual_steps is not None:
            self._manual_steps.release()
            self._manual_steps = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.train_dataloader is not self.data.loader:
            raise ValueError(
                "training reads other loaders than that of PackedCallback's data module: pass the "
                "module itself to fit, and mix sources in its PackedDataset instead of returning "
                "several loaders"
            )
        if not pl_module.automatic_optimization:
            self._manual_steps = ManualSteps(trainer)
        self._start_meter(pl_module)
        if self._rng_states is not None:
            load_rng_states(self._rng_states, trainer.strategy.root_device)
            self._end_with_stream(trainer, self._resumed_state)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._shows_total = False
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
        if not self._shows_total:
            self._shows_total = True
            self._show_train_total(trainer, self.data.loader, batch_idx)
        self._step_rng = self._step_rng or rng_states(trainer.strategy.root_device)
        self._labels = batch.get("labels") if isinstance(batch, dict) else None
        for loss in self._prepared.values():
            loss.token_losses = loss.aux_loss = None
        now, at_start = self.data.accumulation(trainer), self.data.loader.accumulation_steps
        if now != at_start:
            raise ValueError(
                f"accumulate_grad_batches={now}, but the packs of this run are grouped in steps of "
                f"{at_start}: pass it to the Trainer, and do not change it during the run"
            )

    def _show_train_total(self, trainer: Any, loader: PackedLoader, batch_idx: int) -> None:
        """Show how many batches the current epoch has, or are left until `max_steps`.

        batch_idx: the next batch of the epoch.
        """
        if trainer.num_training_batches != math.inf:
            return  # limit_train_batches
        totals = []
        if trainer.max_steps >= 0:
            steps = trainer.max_steps - trainer.global_step
            totals.append(batch_idx + steps * loader.accumulation_steps)
        with suppress(TypeError):  # a stream, or data without end
            totals.append(loader.pass_length())
        _set_total(trainer, "train_progress_bar", min(totals, default=None))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_before_evaluation(trainer)
        self._validation.enter_context(self.meter.paused())

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_before_evaluation(trainer)

    def _check_before_evaluation(self, trainer: Any) -> None:
        """Check models that `fit` has not checked: masks of stock attention may need a repair."""
        for model in self._prepared if self.check else ():
            if model not in self.data.checked_models:
                with trainer.precision_plugin.forward_context():
                    self._check_model(trainer, model)
                self.data.checked_models.append(model)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0 and self.data.val_loader is not None and not trainer.sanity_checking:
            _set_total(trainer, "val_progress_bar", self.data.val_loader.packs)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._validation.close()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._manual_steps is not None:
            self._manual_steps.has_gradients = True

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
        self._measure(info, is_trained=bool(outputs) or self._manual_steps is not None)
        if outputs and "loss" in outputs:  # manual optimization may return anything
            self._micro_losses.append(outputs["loss"].detach())
        if self._manual_steps is not None:
            self._manual_steps.check(self.data.loader.accumulation_steps, state is not None)
        aux_losses = [loss.aux_loss for loss in self._prepared.values()]
        self._aux_losses += [aux_loss for aux_loss in aux_losses if aux_loss is not None]
        if state is None:
            return
        self._step_rng = None
        self._end_with_stream(trainer, state)
        losses, self._micro_losses = self._micro_losses, []
        aux_losses, self._aux_losses = self._aux_losses, []
        for loss in losses:
            self.finite_check.add(loss)
        self.finite_check.end_step(f"step {trainer.global_step}")
        every = trainer.log_every_n_steps  # 0 means never
        if every and trainer.global_step % every == 0:
            self._log_step(pl_module, losses, aux_losses)

    def _measure(self, info: PackInfo, is_trained: bool) -> None:
        """Count a pack; explain once how to make a custom loss exact.

        is_trained: whether the pack was trained; a `training_step` may skip it by returning None.
        """
        found = [loss.token_losses for loss in self._prepared.values()]
        losses = next((losses for losses in found if losses is not None), None)
        self.meter.add(info, self._labels, losses)
        if losses is None and is_trained and not self._said_own_loss:
            self._said_own_loss = True
            self.finite_check.advice = f"{DIVERGED}; if it is your own loss, {OWN_LOSS}"
            print_banner([f"the loss is not that of model(**batch): {OWN_LOSS}"])

    def _end_with_stream(self, trainer: Any, state: dict) -> None:
        """Lower `max_steps` to the current step when the pass of a stream is over.

        With `max_epochs`, Lightning counts the passes; plain data is read again.
        """
        is_counted = trainer.max_epochs != -1 or trainer.max_steps <= trainer.global_step
        if is_counted or self.data.is_plain:
            return
        if is_stream_end(self.data.train_dataset, state):
            print_stream_end(trainer.global_step, trainer.max_steps)
            self._max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def _log_step(
        self, pl_module: pl.LightningModule, losses: list[Tensor], aux_losses: list[Tensor]
    ) -> None:
        rates = tracker_tags({**self.meter.read(), **self.meter.totals()})
        pl_module.log_dict(rates, batch_size=1)
        bar = {"prog_bar": True, "batch_size": 1}
        pl_module.log("tok/s", rates["pack/tokens_per_second"], logger=False, **bar)
        if losses:
            loss = torch.stack(losses)
            loss = loss.mean() if self._manual_steps else loss.sum()
            pl_module.log("train/loss", loss, sync_dist=True, **bar)
        if aux_losses:
            mean = torch.stack(aux_losses).mean()
            pl_module.log("train/aux_loss", mean, sync_dist=True, batch_size=1)
        self.meter.reset()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.finite_check.continue_on_nan:
            self.finite_check.flush()
            check_weights(pl_module, f"step {trainer.global_step}")
        loader, max_steps = self.data.loader, trainer.max_steps
        if trainer.max_epochs != -1 or self.data.is_plain or loader is None:
            return
        if 0 < max_steps <= trainer.global_step and loader.trained_state is not None:
            print_unread_stream(loader.dataset, loader.trained_state, max_steps)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict
    ) -> None:
        loader = self.data.loader  # None before the training: a tuner saves and restores there
        state = self.data.train_dataset.state_dict() if loader is None else loader.trained_state
        if loader is not None:
            loader.layers = trained_layers(self.prepared_layers.values(), self.data.layers)
        checkpoint[DATA_KEY] = gather_data_state(loader, state)
        checkpoint[ACCUMULATION_KEY] = self.data.accumulation(trainer)
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
        self._resumed_state = self.data.train_dataset.state_dict()
        self.data.loader = None  # otherwise the next loader would continue where this one is
        self.data.saved_packs_per_step = checkpoint[DATA_KEY].get(PACKS_PER_STEP)
        self.data.layers = checkpoint[DATA_KEY].get(LAYERS)
        self._rng_states = checkpoint[RNG_KEY]
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        accumulation = checkpoint[ACCUMULATION_KEY], self.data.accumulation(trainer)
        _count_complete_steps(progress, *accumulation)


class ManualSteps:
    """Detects the optimizer steps that a `training_step` takes, and compares them with the packs.

        PackedDataModule(data, accumulation_steps=2)    loss of a pack = its share of the two's mean
        training_step   backward(loss / 2)  backward(loss / 2), step     right
                        backward(loss), step                             refused: inside a step
        without it      backward(loss / 2)                               refused: gradients are kept

    Every batch carries the label tokens of its step, which are counted before it is trained.
    """

    def __init__(self, trainer: Any):
        self._trainer, self._stepped = trainer, False
        self.has_gradients = False
        """Whether a backward ran since the last optimizer step of the data."""
        self._global_step = trainer.global_step
        optimizers = [each for each in trainer.optimizers if isinstance(each, Optimizer)]
        self._handles = [each.register_step_post_hook(self._note) for each in optimizers]
        self._module = trainer.lightning_module
        self._clear_gradients = self._module.on_validation_model_zero_grad
        self._module.on_validation_model_zero_grad = self._clear_between_steps

    def _clear_between_steps(self) -> None:
        """Keep the gradients of an unfinished step.

        Lightning, which does not know about the step, clears gradients before a validation.
        """
        if not self.has_gradients:
            self._clear_gradients()

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def check(self, packs: int, ends_step: bool) -> None:
        """Raise if the batch that was just trained has stepped too early, or not at all.

        packs: packs of an optimizer step on this rank.
        ends_step: whether the batch is the last of its step.
        """
        # A scaler may skip a step, which Lightning counts anyway.
        stepped = self._stepped or self._trainer.global_step != self._global_step
        self._stepped, self._global_step = False, self._trainer.global_step
        if stepped and not ends_step:
            raise ValueError(
                f"training_step steps inside an optimizer step of {packs} packs: step after every "
                f"{packs}, or pass another PackedDataModule(accumulation_steps=)"
            )
        has_gradients = self.has_gradients
        self.has_gradients = has_gradients and not ends_step
        if ends_step and has_gradients and not stepped:
            raise ValueError(
                f"training_step accumulates more than accumulation_steps={packs}, so that its loss "
                "would be a mean of means over packs: pass PackedDataModule(accumulation_steps=N), "
                "and step after every N packs with losses divided by N"
            )

    def release(self) -> None:
        """Stop detecting steps."""
        del self._module.on_validation_model_zero_grad
        for handle in self._handles:
            handle.remove()


def _guard_saves(trainer: pl.Trainer, check: FiniteCheck) -> None:
    """Make a trainer save, and delete older checkpoints, only while its weights are finite.

    A checkpoint is never replaced by one with weights that are not finite. Callbacks cannot ensure
    it: Lightning calls them only for some saves, and they cannot prevent one.
    """
    is_guarded = GUARD in vars(trainer)
    vars(trainer)[GUARD] = check
    if is_guarded:
        return
    save, strategy, is_finite = trainer.save_checkpoint, trainer.strategy, True
    remove = strategy.remove_checkpoint

    @wraps(save)
    def save_finite(*args: Any, **kwargs: Any) -> None:
        nonlocal is_finite
        guard: FiniteCheck = vars(trainer)[GUARD]
        is_finite = guard.may_save(trainer.lightning_module, f"step {trainer.global_step}")
        if is_finite:
            save(*args, **kwargs)

    @wraps(remove)
    def remove_replaced(*args: Any, **kwargs: Any) -> None:
        if is_finite:  # otherwise its replacement was not saved
            remove(*args, **kwargs)

    trainer.save_checkpoint, strategy.remove_checkpoint = save_finite, remove_replaced


def _set_total(trainer: Any, name: str, total: int | None) -> None:
    """Show a total in a progress bar: Lightning cannot know it, since epochs differ in packs."""
    with suppress(AssertionError, TypeError):  # Lightning's property, of a bar that is not there
        bar: Any = getattr(trainer.progress_bar_callback, name, None)
        if bar is not None:
            bar.total = total


def _refuse_batch_size_finder(trainer: Any) -> None:
    finder = pl.callbacks.BatchSizeFinder  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(callback, finder) for callback in trainer.callbacks):
        raise ValueError(
            "BatchSizeFinder changes batch_size, which packs do not have: their size is the "
            "budget= of the data; omit it"
        )


def _count_complete_steps(progress: dict, before: int, now: int) -> None:
    """Convert Lightning's counts of batches to complete steps of the current accumulation.

    Lightning steps whenever its count is a multiple of the accumulation. The checkpoint holds
    complete steps only, although it may have been saved inside a step, when a batch failed.
    """
    batches = progress["current"]
    is_saved_by_step = not batches["processed"] % before  # not yet `completed` then
    is_saved_by_step &= batches["completed"] < batches["processed"]
    for counts in (batches, progress["total"]):
        complete = counts["processed"] // before * now
        counts.update(dict.fromkeys(counts, complete), completed=complete - is_saved_by_step)
