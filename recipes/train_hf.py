"""Train a causal LM on packed documents with the HF Trainer.

nopad train-hf                 # a small Llama on Python's standard library
nopad train-hf path/or/name --data corpus.jsonl --budget 8192
accelerate launch -m nopad train-hf --config train.yaml --resume
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from nopad.cli import count, has_weights, number_from_0, positive, resolve_path
from nopad.cli import parser as command_parser
from nopad.recipes.support import arguments
from nopad.recipes.support.data_and_model import load_data, load_model
from nopad.recipes.support.run_dir import RunDir
from nopad.recipes.support.run_recipe import run_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("train-hf", "[MODEL] [options]", __doc__)
    arguments.add_data_and_model_options(parser, budget=2048)
    add_training_options(parser, "train_hf", learning_rate=1e-3)
    return arguments.parse_with_config(parser, argv, "train_hf")


def add_training_options(parser: argparse.ArgumentParser, recipe: str, learning_rate: float):
    """Add the options that become `TrainingArguments`."""
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=float, default=1.0, help="passes over the data")
    add("--steps", type=positive, help="optimizer steps; overrides --epochs")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=learning_rate, help="peak learning rate")
    add("--warmup", type=count, default=10, help="warmup steps")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    switch: Any = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--layers", choices=("auto", "compiled", "stock"), default="auto",
        help="decoder layers; auto: compiled on a GPU")  # fmt: skip
    add("--checkpointing", help="gradient checkpointing, to save memory", **switch)
    add = parser.add_argument_group("run").add_argument
    arguments.add_run_options(add, recipe, save_every=100)
    add("--keep", type=positive, default=2, help="number of newest checkpoints to keep")
    add("--log-every", type=positive, default=10, help="steps between log lines")
    add("--log-with", default="none", help="tensorboard, wandb, ...")


def train(args: argparse.Namespace, run: RunDir) -> None:
    """Train on `--data`, or on the default corpus."""
    from transformers import set_seed  # imported late: --help is quick

    if args.data is None and args.steps is None:
        args.steps = 150  # the default corpus is a demonstration: one epoch would take too long
    settings = training_arguments(args)  # joins the ranks, on which data and model depend
    set_seed(args.seed)
    tokenizer, data, _ = load_data(args, num_held_out=0)
    model = load_model(args, tokenizer, **tensor_parallel(args, run, settings))
    fit(args, run, settings, model, data, tokenizer)


def training_arguments(args: argparse.Namespace):
    """Translate the options to `TrainingArguments`."""
    import torch
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    if args.log_with not in ("none", "all", *get_available_reporting_integrations()):
        raise ValueError(f"--log-with {args.log_with} is unknown: pip install {args.log_with}")
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


def tensor_parallel(args: argparse.Namespace, run: RunDir, settings) -> dict[str, Any]:
    """Return the loading options for the `tp_size` of accelerate launch; {} without one.

    Groups of `tp_size` ranks share every layer. Several groups shard their weights by FSDP2.
    """
    from nopad.runtime import find_layout, world_size
    from torch import nn
    from transformers.distributed.configuration_utils import DistributedConfig

    size = find_layout(nn.Module()).tensor.size
    if size == 1:
        return {}
    if args.resume or args.model is None or not has_weights(resolve_path(args.model)):
        raise ValueError(
            "tensor parallelism starts from a checkpoint with weights: pass its folder as MODEL; "
            "the HF Trainer cannot resume such a run"
        )
    settings.save_only_model, run.can_resume = True, False
    return {"distributed_config": DistributedConfig(tp_size=size, fsdp_size=world_size() // size)}


def fit(
    args: argparse.Namespace,
    run: RunDir,
    settings,
    model,
    data,
    tokenizer,
    examples: Sequence | None = None,
) -> None:
    """Train on packs.

    examples: prompts with references, to continue every `args.eval_every` steps.
    """
    from nopad.recipes.support.holdout import continuation_evals
    from nopad.trainer.with_hf import EvalCallback, PackedTrainer

    trainer = PackedTrainer(
        model,
        settings,
        train_dataset=data,
        processing_class=tokenizer,
        sequence_parallel=args.sequence_parallel,
        layers=args.layers,
    )
    if examples is not None:
        evals = continuation_evals(args, model, tokenizer, examples)
        trainer.add_callback(EvalCallback(trainer, *evals, console=True))
    train_in_folder(trainer, args, run)


def train_in_folder(trainer: Any, args: argparse.Namespace, run: RunDir) -> None:
    """Train, stop on a signal, and save a model that `from_pretrained` loads."""
    from nopad.trainer.monitoring import check_weights
    from nopad.trainer.with_hf import StopCallback
    from transformers import TrainerCallback

    class StartCallback(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            run.start(state.is_world_process_zero)

    trainer.add_callback(StopCallback())
    trainer.add_callback(StartCallback())
    trainer.train(resume_from_checkpoint=bool(args.resume) or None)
    step = trainer.state.global_step
    check_weights(trainer.model, f"step {step}")
    if finished := step >= trainer.state.max_steps:
        trainer.save_model()
    if trainer.is_world_process_zero():
        run.print_end(f"{run.path}, step {step}", finished)


if __name__ == "__main__":
    sys.exit(run_recipe("train_hf", parse_args, train))
