"""HF Trainer setup shared by train_hf.py and sft.py: options, `TrainingArguments`, the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nopad.cli import count, number_from_0, positive
from nopad.recipes.support.run_dir import RunDir, add_run_options
from nopad.recipes.support.run_recipe import hold_signals


def add_hf_options(parser: argparse.ArgumentParser, recipe: str, learning_rate: float) -> None:
    """Add the options of every recipe that uses the HF Trainer."""
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=float, default=1.0, help="passes over the data")
    add("--steps", type=positive, help="optimizer steps; overrides --epochs")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=learning_rate, help="peak learning rate")
    add("--warmup", type=count, default=10, help="warmup steps")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add("--compile", action="store_true",
        help="torch.compile the decoder layers; pads every pack to the budget")  # fmt: skip
    add("--checkpointing", action="store_true", help="gradient checkpointing, to save memory")
    add = parser.add_argument_group("run").add_argument
    add_run_options(add, recipe)
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--keep", type=positive, default=2, help="number of newest checkpoints to keep")
    add("--log-every", type=positive, default=10, help="steps between log lines")
    add("--log-with", default="none", help="tensorboard, wandb, ...")


def training_arguments(args: argparse.Namespace):
    """Translate the options to `TrainingArguments`, which join the ranks of the launch.

    Data and model are loaded after that: both depend on the layout of the ranks.
    """
    import torch
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    installed = get_available_reporting_integrations()
    if args.log_with not in ("none", "all", *installed):
        raise ValueError(
            f"--log-with {args.log_with} is unknown or not installed "
            f"(installed: {', '.join(installed) or 'none'}); pip install {args.log_with}"
        )
    return TrainingArguments(
        args.output,
        max_steps=args.steps or -1,
        num_train_epochs=args.epochs,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        use_cpu=not torch.accelerator.is_available(),  # otherwise bf16 is refused on a CPU
        gradient_checkpointing=args.checkpointing,
        dataloader_num_workers=args.workers,
        seed=args.seed,
        save_steps=args.save_every,
        save_total_limit=args.keep,
        logging_steps=args.log_every,
        report_to=args.log_with,
    )


def prepare_saving(args: argparse.Namespace, settings, model) -> None:
    """Save weights alone with tensor parallelism: the Trainer saves no sharded optimizer."""
    settings.save_only_model = (model.tp_size or 1) > 1
    if settings.save_only_model and args.resume:
        raise ValueError(
            "the HF Trainer does not resume a run with tensor parallelism: start a new run with "
            "the folder of a checkpoint as MODEL"
        )


def train_with_hf(
    args: argparse.Namespace,
    settings,
    run_dir: RunDir,
    model,
    data,
    tokenizer,
    examples: Sequence = (),
) -> None:
    """Train on packs with the HF Trainer; stop on a signal; save a model that loads.

    settings: the `training_arguments`.
    examples: prompts with references, to continue every `args.eval_every` steps.
    """
    from nopad.collators import PackedCollator
    from nopad.trainer.fused import compile_layers
    from nopad.trainer.monitoring import check_weights
    from nopad.trainer.with_hf import PackedTrainer, StopCallback
    from transformers import TrainerCallback

    prepare_saving(args, settings, model)
    run_dir.can_resume = not settings.save_only_model

    class StartCallback(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            run_dir.start_training(state.is_world_process_zero)

    with hold_signals():
        stop = StopCallback()  # first: a signal must not wait for what follows
        trainer = PackedTrainer(
            model,
            settings,
            PackedCollator(pad_to_budget=args.compile),
            data,
            processing_class=tokenizer,
            callbacks=[stop, StartCallback()],
            continue_on_nan=args.continue_on_nan,
            sequence_parallel=args.sequence_parallel,
            fused=not args.compile,
        )
        if args.compile:
            compile_layers(model)
        if examples:
            from nopad.recipes.support.holdout import continuation_eval
            from nopad.trainer.with_hf import EvalCallback

            evaluation = continuation_eval(model, tokenizer, examples, args.eval_every, args.seed)
            trainer.add_callback(EvalCallback(trainer, evaluation, console=True))
        trainer.train(resume_from_checkpoint=bool(args.resume) or None)
        check_weights(trainer.model, f"step {trainer.state.global_step}")
        finished = trainer.state.global_step >= trainer.state.max_steps
        if finished:
            trainer.save_model()
        if trainer.is_world_process_zero():
            reached = f"{trainer.args.output_dir}, step {trainer.state.global_step}"
            print(f"done: {reached}" if finished else run_dir.stop_line(reached))
