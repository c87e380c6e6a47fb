"""Packs in the HF Trainer and trainers derived from it, such as TRL's SFTTrainer.

    class PackedTrainer(PackedTrainerMixin, Trainer): pass          # defined here
    class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer): pass    # in with_trl/

    PackedTrainer(model, args, train_dataset=PackedDataset(...)).train(resume_from_checkpoint=True)

The training loop is the stock one. The mixin changes four things: the loader yields packs, grouped
by optimizer step; the loss is exact and needs no memory for logits; checkpoints hold the data
position; and the log shows fill, throughput and MFU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

from ...attention.hf import ATTN_IMPLEMENTATION
from ...packing import IGNORE_INDEX, PackedDataset
from ...runtime import (
    find_layout,
    join_sequence_group,
    sum_over_ranks,
    to_device,
    unwrap_peft,
    world_size,
)
from ..banner import print_banner
from ..data.data_state import load_data_state, save_data_state
from ..data.loader import Batch, PackedLoader, PackInfo, UnsizedLoader, check_collator
from ..data.model_limits import ModelLimits
from ..data.plain_data import check_plain, pack_like, pack_plain, text_tokenizer
from ..layers import PreparedLayers, prepare_layers, sharding_obstacle
from ..loss.attached_loss import attach_trainer_loss
from ..monitoring.finite_check import FiniteCheck, check_weights
from ..monitoring.preflight import (
    check_first_batches,
    check_run,
    describe_speedups,
    print_resumed,
)
from ..monitoring.throughput import ThroughputMeter
from .arguments import (
    HONOURED,
    adapt_arguments,
    check_arguments,
    plain_settings,
    take_sequence_parallel,
    weight_auxiliary_loss,
)
from .epochs import EpochCallback, count_again, last_step, set_epochs
from .evaluation import EvalCallback, TrainerEvaluationLoader, metrics_kept, trl_log
from .intact_checkpoints import IntactCheckpointMixin, resumed_folder

SHOWN = ("pack/fill", "pack/tokens_per_second", "pack/mfu")
"""The rates of packs that the terminal shows."""
TRL_TRAINERS = {
    "DPOTrainer": "nopad.trainer.with_trl.PackedDPOTrainer",
    "GRPOTrainer": "nopad.trainer.with_trl.LiveGRPOTrainer",
    "KTOTrainer": "nopad.trainer.with_trl.PackedKTOTrainer",
    "RLOOTrainer": "nopad.trainer.with_trl.LiveRLOOTrainer",
    "RewardTrainer": "nopad.trainer.with_trl.PackedRewardTrainer",
}
"""Trainers of TRL that pack their own batches, in place of `PackedTrainerMixin`."""
REPLACED = {
    ("trl", "SFTTrainer"): "PackedSFTTrainer",
    ("axolotl", "AxolotlTrainer"): "NopadTrainer",
}
"""Trainers of other libraries whose `compute_loss` the mixin replaces, and the class that does."""


class PackedTrainerMixin(IntactCheckpointMixin):
    """Mixin, listed before a Trainer, that trains on packs.

    `self.args` is a copy of your arguments: yours are not changed.

    With `max_steps`, the data continues at its current position; if a streamed `PackedDataset` ends
    earlier, because of its `epochs`, the training ends with it. With `num_train_epochs`, the data
    starts at the beginning, and its `epochs` are set to that number. A second `train()` starts at
    step 0, like the stock one, but with new data: with `max_steps` it continues after the last
    trained pack, with `num_train_epochs` it trains the next epochs.

    If the evaluation set is not a `PackedDataset`, it is packed with the settings of the training
    data, and its text is tokenized with `processing_class`. Without an evaluation set,
    `eval_strategy` runs the evaluations by generation that have `every=None`.

    Args:
        model: as in the HF Trainer: a causal LM, or a path to one.
        args: `TrainingArguments`, or the trainer's own, such as TRL's `SFTConfig`. Options that
            packs would ignore are refused.
        data_collator: a `PackedCollator` with your options; default: one without options.
        train_dataset: a `PackedDataset`, or plain data (`datasets.Dataset`, `IterableDataset`,
            list, path) of tokens, or of text for `processing_class`. Plain data is packed with the
            `seed` of the arguments; samples are cut at the model's longest sequence.
        budget: tokens of a pack, for plain data.
        z_loss: weight of the squared log-normalizer in the loss.
        layers: "compiled" (`compile_layers`), "stock", or "auto": compiled on a GPU where they can
            be, and the banner says why not. A resumed run keeps those of its checkpoint.
        fp8: run the large products of compiled layers in fp8 while training.
        check: before the first step, refuse runs that would train wrongly.
        continue_on_nan: continue after a loss that is not finite, instead of raising
            `NonFiniteError`; weights that are not finite are not saved.
        sequence_parallel: ranks that share the tokens of each pack; also `sp_size` or `cp_size` of
            `args.parallelism_config`.
        kwargs: the trainer's other arguments, such as `eval_dataset`, `processing_class`,
            `callbacks`, `optimizers` and `compute_metrics`.
    """

    loss_is_scaled_for_ga: bool | None = None
    """For a custom `compute_loss`: True if it divides by `inputs["num_items_in_batch"]`, False if
    it is the mean of a batch, which is then divided by the accumulation steps."""
    _counted_steps: int | None = None
    """The `max_steps` that were counted from `num_train_epochs`."""
    _loaded_folder: str | None = None
    """The checkpoint whose weights were loaded last."""
    _trained_state: dict | None = None
    """The data state after the last trained step, or at the start of the training."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *,
        budget: int | None = None,
        z_loss: float = 0.0,
        layers: str = "auto",
        fp8: bool = False,
        check: bool = True,
        continue_on_nan: bool = False,
        sequence_parallel: int = 1,
        **kwargs: Any,
    ):
        check_compute_loss(type(self))
        check_collator(data_collator)
        args = copy(args) if args is not None else TrainingArguments()
        self.packed_collator, self.packed_check = data_collator, check
        self._sequence_parallel = take_sequence_parallel(args, sequence_parallel)
        self._layers, self._fp8 = layers, fp8
        self.finite_check = FiniteCheck(continue_on_nan)
        self._loss_options = {"z_loss": z_loss}
        self.train_dataset = self._init_trainer(model, args, train_dataset, budget, kwargs)
        self._prepare_model()
        # The attached loss takes the number of labels, even if the model does not.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga is not False
        self._epochs = EpochCallback(self, ends_with_stream=budget is None)
        self.callback_handler.callbacks.insert(0, self._epochs)
        self.callback_handler.callbacks = list(map(_shortened, self.callback_handler.callbacks))
        self.meter: ThroughputMeter | None = None
        """Throughput of the training; None before it starts."""
        self._loader: PackedLoader | None = None
        self._eval_loaders: dict[int, tuple[Any, TrainerEvaluationLoader]] = {}
        """Loaders by the id of their evaluation set, which is kept."""
        self._eval_loader: TrainerEvaluationLoader | None = None
        """The loader of the latest evaluation."""
        self._resume_from: Path | None = None
        self._aux_loss, self._aux_steps = torch.zeros(()), 0
        """The sum of this rank's auxiliary losses since the last log, and the number of steps."""
        self._logged_values: dict[str, float] = {}
        """The mean auxiliary loss and the totals of packs that the next log shows."""
        self._checked_loss: Any = None
        """The attached loss of the model that the start check has passed."""
        self.prepared_layers: PreparedLayers | None = None
        """The layers that train; None before the training starts."""
        self._trained_pack: PackInfo | None = None
        """The pack of the last micro-step."""
        self.token_sums: dict[str, list[float]] = {}
        """Right predictions, entropies and labels since TRL's last log, of "train" and "eval"."""

    def _init_trainer(
        self, model: Any, args: Any, data: Any, budget: int | None, kwargs: dict[str, Any]
    ) -> PackedDataset:
        """Check the arguments, initialize the stock trainer, and return the packed data."""
        self._find_layout(model, data, args.parallelism_config)
        given, settings = copy(args), None
        if check_plain(data, budget, "train_dataset"):
            settings = plain_settings(args, kwargs, budget)
        else:
            check_arguments(args, data, kwargs)
            self._count_steps(args, data)
        self._loss_options["label_smoothing"] = adapt_arguments(args)
        accepted = _accepted_dataset(type(self), data, args)
        # Evaluations by generation need no set, and are added later: `train` checks for them.
        has_none = args.eval_strategy != "no" and kwargs.get("eval_dataset") is None
        kwargs |= {"eval_dataset": accepted} if has_none else {}
        given_data = {"data_collator": self.packed_collator, "train_dataset": accepted}
        super().__init__(model=model, args=args, **given_data, **kwargs)
        self.eval_dataset = None if has_none else self.eval_dataset
        made: Any = self.model  # by now, from a path or model_init as well
        if settings is not None:
            data = self._pack(data, made.config, settings)
        else:
            data.check_tokenizer(text_tokenizer(self.processing_class))
        self._find_layout(made, data)
        self._sequence_group = join_sequence_group(self.layout)
        if settings is not None:
            check_arguments(given, data, kwargs, HONOURED)
            self._count_steps(self.args, data)
        return data

    def _pack(self, data: Any, config: Any, settings: dict[str, Any]) -> PackedDataset:
        """Pack plain data for a model; its text is tokenized by `processing_class`."""
        tokenizer: Any = self.processing_class
        try:
            return pack_plain(data, config, tokenizer=tokenizer, **settings)
        except ValueError as error:
            if tokenizer is None and "pass tokenizer=" in str(error):
                raise ValueError(str(error).replace("tokenizer=", "processing_class=")) from None
            raise

    def _find_layout(self, model: Any, data: Any, settings: Any = None) -> None:
        """Find the role of this process in the run, and the packs it reads."""
        known = model if isinstance(model, nn.Module) else nn.Module()
        self.layout = find_layout(known, settings, sequence_parallel=self._sequence_parallel)
        if isinstance(data, PackedDataset):
            data.place(self.layout)

    def _count_steps(self, args: TrainingArguments, data: PackedDataset) -> None:
        if args.max_steps <= 0:
            args.max_steps = self._counted_steps = set_epochs(args, data)

    def _prepare_model(self) -> None:
        """Attach the loss, before the model is wrapped."""
        model = self.accelerator.unwrap_model(self.model)
        weight_auxiliary_loss(self.args, unwrap_peft(model))
        self.attached_loss = attach_trainer_loss(model, self._loss_options, self._sequence_group)

    def _prepare_layers(self) -> None:
        """Compile the layers or not, before the model is wrapped, as the loaded checkpoint did."""
        assert self._loader is not None
        if self.prepared_layers is None:
            obstacle = sharding_obstacle(self.accelerator)
            if self.args.torch_compile:
                obstacle = "torch_compile=True compiles the whole model"
            model = unwrap_peft(self.accelerator.unwrap_model(self.model))
            self.prepared_layers = prepare_layers(
                model,
                self.args.device,
                self._layers,
                fp8=self._fp8,
                saved=self._loader.layers,
                obstacle=obstacle,
                layout=self.layout,
            )

    def _reject_skip_prepare_without_labels(self, *_: Any, **__: Any) -> None:
        # TRL looks for columns of masks in evaluation sets; PackedDataset refuses them itself.
        return

    def get_train_dataloader(self) -> Any:
        self._loader = UnsizedLoader(
            self.train_dataset,
            self.packed_collator,
            accumulation_steps=self.args.gradient_accumulation_steps,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(self.args, "dataloader_multiprocessing_context", None),
            count_items=False,
            layout=self.layout,
        )
        self._set_position()
        model = unwrap_peft(self.accelerator.unwrap_model(self.model))
        if self.attached_loss.model is not model:  # `model_init` has made another one
            self._prepare_model()
            self.prepared_layers = None
        self._prepare_layers()
        if self.packed_check:
            banner = self._check_model(self.train_dataset)
            print_banner([*banner, describe_speedups(self.attached_loss, self.prepared_layers)])
            check_first_batches(self._loader, model)
        self.meter = ThroughputMeter.of(self._loader, model)
        return self._loader

    def _check_model(self, data: PackedDataset) -> list[str]:
        """Return the lines of the banner; raise if packs of this data would be wrong."""
        model = unwrap_peft(self.accelerator.unwrap_model(self.model))
        with self.accelerator.autocast():
            banner = check_run(model, data, self.packed_collator, self.layout)
        self._checked_loss = self.attached_loss
        return banner

    def _set_position(self) -> None:
        """Continue from the checkpoint, if there is one; count the steps that are left."""
        assert self._loader is not None
        data, counts_epochs = self.train_dataset, self._counts_epochs()
        if counts_epochs:
            self._counted_steps = count_again(self.args, data)
        if self._resume_from is not None:
            load_data_state(self._loader, self._resume_from)
            print_resumed(self._resume_from, data)
            if counts_epochs:
                self._counted_steps = last_step(self.args, data, self._resume_from)
        if counts_epochs:
            self.args.max_steps = self._counted_steps
        self._trained_state = self._loader.state()

    def _counts_epochs(self) -> bool:
        """Whether the length is `num_train_epochs`, and nobody has set `max_steps` since."""
        return self.args.max_steps <= 0 or self.args.max_steps == self._counted_steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        datasets: Any = self.eval_dataset
        data = datasets if eval_dataset is None else eval_dataset
        if isinstance(data, str):  # the name of one of several
            data = datasets[data]
        if data is None:
            return super().get_eval_dataloader()  # raises
        if id(data) not in self._eval_loaders:  # kept: each reads its data once to count labels
            packed = pack_like(self.train_dataset, data, self.processing_class)
            loader = TrainerEvaluationLoader(packed, self.packed_collator, layout=self.layout)
            loader.gradient_state = self.accelerator.gradient_state
            if self.packed_check:
                if self._checked_loss is not self.attached_loss and self._has_stock_attention():
                    self._check_model(packed)  # an evaluation without training: masks are repaired
                loader.limits = ModelLimits.of(self.accelerator.unwrap_model(self.model))
            self._eval_loaders[id(data)] = data, loader
        self._eval_loader = self._eval_loaders[id(data)][1]
        return self._eval_loader

    def _has_stock_attention(self) -> bool:
        config = self.attached_loss.model.config.get_text_config()
        return config._attn_implementation != ATTN_IMPLEMENTATION

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.get_eval_dataloader(test_dataset)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any):
        self._resume_from = resumed_folder(self.args, resume_from_checkpoint)
        self._check_has_evaluation()
        if kwargs.get("trial", args[0] if args else None) is not None:
            self.train_dataset.rewind()  # trials of a hyperparameter search train on the same data
        elif self._resume_from is None and self._loader is not None:
            self._continue_data()
        if self._counts_epochs():
            self.args.max_steps, self._counted_steps = -1, None  # a trial may set either
        output = super().train(self._resume_from, *args, **kwargs)
        self._check_finite_end()
        return output

    def _check_has_evaluation(self) -> None:
        """Refuse evaluations that would have nothing to evaluate."""
        strategy: Any = self.args.eval_strategy
        has_none = strategy != "no" and self.eval_dataset is None
        if has_none and not self._evaluates_by_generation():
            raise ValueError(
                f"eval_strategy={str(strategy.value)!r} has nothing to evaluate: pass "
                "eval_dataset=, or add EvalCallback(trainer, evaluation) with a GenerationEval "
                "whose every is None"
            )

    def _evaluates_by_generation(self) -> bool:
        """Return whether an evaluation by generation joins the trainer's own."""
        callbacks = (c for c in self.callback_handler.callbacks if isinstance(c, EvalCallback))
        return any(e.every is None for callback in callbacks for e in callback.evaluations)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loaded_folder = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._loaded_folder = self.state.best_model_checkpoint
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        assert self._loaded_folder is not None
        load_converted(self.model, self._loaded_folder, load_result.missing_keys)

    def _continue_data(self) -> None:
        """Begin another training with the data that follows the last one."""
        data = self.train_dataset
        if not self._counts_epochs():
            assert self._trained_state is not None
            return data.load_state_dict(self._trained_state)
        data.end_pass()
        data.start_next_pass()

    def _check_finite_end(self) -> None:
        if not self.finite_check.continue_on_nan:
            self.finite_check.flush()
            check_weights(self.model, f"step {self.state.global_step}")

    def get_batch_samples(self, *args: Any, **kwargs: Any):
        # The stock loop checks max_steps after a step, so a finished run that is resumed would
        # take one more step.
        if self.state.global_step >= self.state.max_steps:
            return [], None
        batches, items = super().get_batch_samples(*args, **kwargs)
        if items is not None and self._overrides_loss() and self.loss_is_scaled_for_ga is not False:
            # The share of a rank, so that `model(**inputs).loss` is exact if it is not passed on.
            share = float(items) / self._num_replicas()
            batches = [{**batch, "num_items_in_batch": share} for batch in batches]
        return batches, items

    def _overrides_loss(self) -> bool:
        return type(self).compute_loss is not PackedTrainerMixin.compute_loss

    def _num_replicas(self) -> int:
        """Return the factor of the stock `compute_loss` for a loss divided by all ranks' items."""
        return self.accelerator.num_processes // self.get_tp_size()

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None):
        self.attached_loss.token_losses = self.attached_loss.aux_loss = None
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_own_loss()
        if self._loader is not None and self.meter is not None:
            info, state = self._loader.issued.popleft()
            self._trained_pack = info
            self.meter.add(info, inputs["labels"], self.attached_loss.token_losses)
            self.finite_check.add(loss)
            if self.attached_loss.aux_loss is not None:
                self._aux_loss = self._aux_loss.to(loss.device) + self.attached_loss.aux_loss
                self._aux_steps += state is not None
            if state is not None:
                self._trained_state = state
                self.finite_check.end_step(f"step {self.state.global_step + 1}")
        return loss

    def _mean_aux_loss(self) -> dict[str, float]:
        """Return the mean auxiliary loss of the steps since the last log, over all ranks."""
        if not self._aux_steps:
            return {}
        total, steps = float(sum_over_ranks(float(self._aux_loss))), self._aux_steps
        self._aux_loss, self._aux_steps = torch.zeros(()), 0
        return {"aux_loss": total / self.get_tp_size() / steps}

    def _check_own_loss(self) -> None:
        """Refuse a loss that did not come from the model, unless the class declares its scale."""
        is_own = self._overrides_loss() and self.attached_loss.token_losses is None
        batches = self.current_gradient_accumulation_steps * self._num_replicas()
        if is_own and batches > 1 and self.loss_is_scaled_for_ga is None:
            raise ValueError(
                f"{type(self).__name__}.compute_loss computes its own loss, and a step has "
                f"{batches} batches: set loss_is_scaled_for_ga=True in the class if it divides by "
                "inputs['num_items_in_batch'], False if it is the mean of a batch"
            )

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        # The stock method would count the token of an empty pack, and tokens of documents that are
        # equal to the padding as padding.
        counted, pack = self.args.include_num_input_tokens_seen, self._trained_pack
        if counted == "no" or pack is None or self._loader is None:
            return
        has_padding = counted == "all" and pack.num_tokens
        tokens = inputs["input_ids"].numel() if has_padding else pack.num_tokens
        readers = world_size() // self._loader.packs_at_a_time
        self.state.num_input_tokens_seen += int(sum_over_ranks(tokens)) // max(1, readers)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._log_save_evaluate(*args, **kwargs)
        if self._epochs.ends_within_pass():  # the stock loop sees the ends of passes only
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_save_evaluate(*args, **kwargs)
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Here, because all ranks reach this point; `log` may be called on one rank only.
        should_log = self.control.should_log
        self._logged_values = self._mean_aux_loss() | self._pack_totals() if should_log else {}
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _pack_totals(self) -> dict[str, float]:
        """Return tokens and samples since the start, summed over ranks, by their names in logs."""
        totals = {} if self.meter is None else self.meter.totals()
        return {_PackTag(f"pack/{name}"): value for name, value in totals.items()}

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        has_none = eval_dataset is None and self.eval_dataset is None
        if has_none and self._evaluates_by_generation():
            metrics: dict[str, float] = {}  # the callback fills it, and logs its metrics itself
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics
        needs_logits = self.compute_metrics is not None
        logits = self._logits_kept() if needs_logits else nullcontext()
        with self._paused_meter(), logits:
            return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        only_losses = self.args.prediction_loss_only
        logits = nullcontext() if only_losses else self._logits_kept()
        with self._paused_meter(), logits, metrics_kept(self, "eval"):
            output = super().predict(*args, **kwargs)
        self._count_samples(output.metrics or {})
        return output

    def _count_samples(self, metrics: dict[str, float]) -> None:
        """Count samples in the rate of an evaluation, where the stock trainer counts packs."""
        for name in list(metrics):
            runtime = metrics.get(name.replace("_samples_per_second", "_runtime"))
            if name.endswith("_samples_per_second") and runtime and self._eval_loader is not None:
                metrics[name] = round(self._eval_loader.samples / runtime, 3)

    def _logits_kept(self) -> AbstractContextManager:
        if self.attached_loss.head == "document" and world_size() > 1:
            raise ValueError(
                "ranks have different numbers of documents, whose logits the Trainer cannot "
                "gather: evaluate the loss only, or compute metrics in one process"
            )
        is_padded = getattr(self.packed_collator, "pad_to_budget", False)
        if self.attached_loss.head == "document" and is_padded:
            raise ValueError(
                "logits would have rows for the padding of fixed shapes: evaluate the loss only, "
                "or omit pad_to_budget, stack and fixed_sequences"
            )
        return self.attached_loss.logits_kept()

    def _paused_meter(self) -> AbstractContextManager:
        return nullcontext() if self.meter is None else self.meter.paused()

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any):
        # Directly to the stock method: TRL's computes its loss from another forward.
        with self._measured_for_trl():
            return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    @contextmanager
    def _measured_for_trl(self) -> Iterator[None]:
        """Measure the batch of the block for TRL's log; nothing in other trainers.

        TRL computes `mean_token_accuracy` and `entropy` from logits. From hidden states they cost
        another product with the LM head, so training measures only the steps that are logged (TRL
        averages over all steps); evaluations measure every batch. They are means over tokens, while
        TRL averages the means of batches.
        """
        metrics, loss = trl_log(self), self.attached_loss
        if metrics is None:
            yield
            return
        model: Any = self.model
        mode = "train" if model.training else "eval"
        loss.measures_tokens = mode == "eval" or self._logs_step()
        try:
            yield
            if loss.measures_tokens and loss.token_statistics is not None:
                sums: Any = self.accelerator.reduce(loss.token_statistics, "sum")
                sums = sums.tolist()
                if "mean_token_accuracy" in metrics[mode]:  # not logged since
                    sums = [a + b for a, b in zip(sums, self.token_sums[mode], strict=True)]
                self.token_sums[mode] = sums
                _set_means(metrics[mode], *sums)
        finally:
            loss.measures_tokens, loss.token_statistics = False, None

    def _logs_step(self) -> bool:
        """Return whether the log shows the current step."""
        step, last = self.state.global_step + 1, self.state.max_steps
        if self.args.logging_strategy != "steps":
            return self._epochs.ends_epoch() or step == last
        is_first = step == 1 and self.args.logging_first_step
        return is_first or step % self.state.logging_steps == 0 or step == last

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        if not batch_samples:
            return None
        if "num_items_in_batch" in batch_samples[0]:  # an evaluation batch carries its share
            return batch_samples[0]["num_items_in_batch"] * self._num_replicas()
        # The stock method waits for the device when it copies the count there. Ranks of a sequence-
        # parallel group all count: `compute_loss` multiplies by them as well.
        total = sum_over_ranks(sum(map(_loss_weight, batch_samples))).clamp(min=1)
        total = total / self.get_tp_size()
        if "loss_weights" in batch_samples[0]:
            return float(total)  # not a tensor: FSDP casts tensors of floats to bf16
        return to_device(total.long(), device)

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        # Torch's context parallelism would attend across documents; the attached loss splits rows.
        return nullcontext, inputs

    def _prepare_inputs(self, inputs: Any) -> Any:
        # The stock method waits for the device at every copy.
        device = self.args.device
        moved = {n: to_device(x, device) if torch.is_tensor(x) else x for n, x in inputs.items()}
        return super()._prepare_inputs(moved)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_runtime" not in logs:
            self._count_samples(logs)
        if self.meter is not None and self._loader is not None:
            # The trainer counts packs as samples, and the run as one epoch.
            self.state.epoch = self._loader.epochs_done() or self.state.epoch
            if "train_runtime" in logs:
                logs |= self._pack_totals()  # all ranks log the end of the training
                samples = logs["pack/samples_seen"]
                logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
            if "loss" in logs:
                rates = {_PackTag(f"pack/{name}"): v for name, v in self.meter.read().items()}
                logs = {**logs, **rates, **self._logged_values}
                if (metrics := trl_log(self)) is not None:
                    metrics["train"]["num_tokens"] = [logs["pack/tokens_seen"]]
                self.meter.reset()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.finite_check.may_save(self.model, f"step {self.state.global_step}"):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.processing_class is None and self.train_dataset is not None:
            tokenizer = self.train_dataset.encoder.tokenizer
            if isinstance(tokenizer, PreTrainedTokenizerBase):  # `nopad generate` needs it
                tokenizer.save_pretrained(output_dir or str(self.args.output_dir))

    def _save_data_state(self, folder: Path) -> None:
        if self._loader is not None:
            assert self.prepared_layers is not None
            self._loader.layers = self.prepared_layers.way  # known after the first step
            save_data_state(self._loader, folder)


class PackedTrainer(PackedTrainerMixin, Trainer):
    """The HF Trainer with packs; the arguments are those of `PackedTrainerMixin`."""


class ShortProgress(ProgressCallback):
    """The progress bar, with only the main rates of packs in a line."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps  # a stream may end before
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=_shorten(logs), **kwargs)


class ShortPrinter(PrinterCallback):
    """The printed lines, with only the main rates of packs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=_shorten(logs), **kwargs)


def _shorten(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a line: those of the training, and the main rates of packs."""
    return {n: v for n, v in logs.items() if not n.startswith("pack/") or n in SHOWN}


def _shortened(callback: Any) -> Any:
    """Return a callback that writes short lines to the terminal in place of a stock one."""
    short = {ProgressCallback: ShortProgress, PrinterCallback: ShortPrinter}.get(type(callback))
    return callback if short is None else short()


class _PackTag(str):
    """A name that stays `pack/fill` in trackers, whose callbacks prepend `train/` to every name.

    >>> "train/" + _PackTag("pack/fill"), "train/" + "loss"
    ('pack/fill', 'train/loss')
    """

    __slots__ = ()

    def __radd__(self, other: str) -> str:
        return str(self)


def check_compute_loss(trainer: type) -> None:
    """Refuse trainers whose `compute_loss` would not be called, or does not take packs."""
    bases = trainer.__mro__
    below = bases[bases.index(PackedTrainerMixin) + 1 :]
    packed = "PackedTrainer"
    for base in reversed(bases):
        library = base.__module__.partition(".")[0]
        if (library, base.__name__) in REPLACED:
            packed = REPLACED[library, base.__name__]
        elif "compute_loss" not in vars(base) or base in (PackedTrainerMixin, Trainer):
            continue
        elif library == "trl":
            advice = TRL_TRAINERS.get(base.__name__, "the class without PackedTrainerMixin")
            raise ValueError(
                f"{base.__name__} computes its loss from its own batches: use {advice}"
            )
        elif base in below:
            raise ValueError(
                f"{base.__name__}.compute_loss would not be called: list the class first, "
                f"class {trainer.__name__}({base.__name__}, {packed})"
            )


def _accepted_dataset(trainer: type, data: Any, args: Any) -> Any:
    """Return a data set that the trainer's __init__ accepts: TRL's accepts only its own type."""
    modules = (sys.modules[base.__module__] for base in trainer.__mro__)
    trl: Any = next((m for m in modules if m.__name__.startswith("trl.")), None)
    if trl is None:
        return data
    if not hasattr(args, "dataset_kwargs"):
        raise ValueError(
            f"args is a {type(args).__name__}, but the trainer is TRL's: pass an SFTConfig"
        )
    # TRL checks what only its own packing and its own masks need.
    args.packing = args.padding_free = args.assistant_only_loss = False
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return trl.Dataset.from_dict({"input_ids": [[0, 1]]})


def load_converted(model: Any, folder: str, missing: list[str]) -> None:
    """Load the weights of a checkpoint that Transformers has saved in the layout of the hub.

        save_pretrained     experts.gate_up_proj  ─▶  experts.0.w1, experts.0.w3, ...
        stock Trainer       load_state_dict(strict=False): the experts keep the weights they have

    The stock Trainer saves with the one and loads with the other, when it resumes a run and when it
    loads the best model. Weights that it could not assign are loaded by `from_pretrained`, which
    converts them. Raises if some are not in the checkpoint.

    missing: names that the checkpoint does not have in the layout of the model.
    """
    tied = set(model.all_tied_weights_keys)
    if not set(missing) - tied:
        return
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    saved, found = type(model).from_pretrained(
        folder,
        config=model.config,
        dtype=reduce(torch.promote_types, dtypes),
        output_loading_info=True,
    )
    if absent := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(absent)} weights of the model, such as {absent[0]}: it was saved "
            "from another model"
        )
    model.load_state_dict(saved.state_dict())


def _loss_weight(batch: Batch) -> float:
    """Return the sum of the loss weights of a batch; its number of labels, if it has none.

    >>> _loss_weight({"labels": torch.tensor([[IGNORE_INDEX, 5, IGNORE_INDEX, 7]])})
    2.0
    """
    weights = batch.get("loss_weights")
    if weights is None:
        weights = batch["labels"][..., 1:] != IGNORE_INDEX  # the first label has no prediction
    return float(weights.sum())


def _set_means(metrics: dict[str, list[float]], right: float, entropy: float, labels: float):
    if labels:
        metrics["mean_token_accuracy"] = [right / labels]
        metrics["entropy"] = [entropy / labels]
