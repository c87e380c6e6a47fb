"""What recipes on the HF Trainer share: its options, its arguments, the run itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nopad.cli import count, positive
from nopad.recipes.support.arguments import Training, heard_to_the_end
from nopad.recipes.support.run_dir import RunFolder, run_options


def hf_options(parser: argparse.ArgumentParser, recipe: str, learning_rate: float) -> None:
    """Add what every recipe on the HF Trainer takes."""
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=float, default=1.0, help="passes over the data")
    add("--steps", type=positive, help="optimizer steps; without it, those of --epochs")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=float, default=learning_rate, help="at its peak")
    add("--warmup", type=count, default=10, help="steps until the peak")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add("--compile", action="store_true", help="compile the decoder layer; T is then constant")
    add("--checkpointing", action="store_true", help="recompute activations to save memory")
    add = parser.add_argument_group("run").add_argument
    run_options(add, recipe)
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--log-every", type=positive, default=10, help="steps between lines of the log")
    add("--log-with", default="none", help="tensorboard, wandb, ...")


def hf_arguments(args: argparse.Namespace):
    """Put these settings into the words of the HF Trainer."""
    import torch
    from transformers import TrainingArguments
    from transformers.integrations import get_available_reporting_integrations

    there = get_available_reporting_integrations()
    if args.log_with not in ("none", "all", *there):
        found = ", ".join(there) or "none"
        told = f"not installed, or unknown (to be had here: {found})"
        raise ValueError(f"--log-with {args.log_with}: {told}; pip install {args.log_with}")
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
        use_cpu=not torch.accelerator.is_available(),  # else it would refuse bf16 there
        gradient_checkpointing=args.checkpointing,
        dataloader_num_workers=args.workers,
        seed=args.seed,
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=args.log_every,
        report_to=args.log_with,
    )


def hf_train(
    args: argparse.Namespace, folder: RunFolder, model, data, tokenizer, examples: Sequence = ()
) -> None:
    """Train on packs with the HF Trainer; stop when asked, and leave a model that loads.

    examples: prompts with answers, to be continued every `args.eval_every` steps.
    """
    from nopad.collators import PackedCollator
    from nopad.trainer.fused import compile_layers, fuse_layers
    from nopad.trainer.with_hf import PackedTrainer, StopCallback
    from transformers import TrainerCallback

    class Begun(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.is_world_process_zero:
                folder.start()
            Training.begun = True

    with heard_to_the_end():
        trainer = PackedTrainer(
            model,
            hf_arguments(args),
            PackedCollator(pad_to_budget=args.compile),
            data,
            processing_class=tokenizer,
            callbacks=[StopCallback(), Begun()],
        )
        if args.compile:
            compile_layers(model)
        else:
            fuse_layers(model, trainer.args.device)  # not wrapped before the first step
        if examples:
            from nopad.recipes.support.holdout import continuing
            from nopad.trainer.with_hf import EvalCallback

            evaluation = continuing(model, tokenizer, examples, args.eval_every, args.seed)
            trainer.add_callback(EvalCallback(trainer, evaluation, console=True))
        trainer.train(resume_from_checkpoint=bool(args.resume) or None)
        whole = trainer.state.global_step >= trainer.state.max_steps
        if whole:
            trainer.save_model()
        if trainer.is_world_process_zero():
            say = "done" if whole else "stopped, go on with --resume"
            print(f"{say}: {trainer.args.output_dir}, step {trainer.state.global_step}")
