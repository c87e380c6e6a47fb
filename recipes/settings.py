"""Settings of a recipe: the command line, and a YAML file of the same names that it overrides.

python recipes/sft.py --config sft.yaml --learning-rate 1e-5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`; what `--config FILE` names becomes the defaults."""
    parser.add_argument("--config", type=Path, help="YAML file of these settings")
    known = {action.dest for action in parser._actions}
    first, _ = parser.parse_known_args(argv)
    if first.config is not None:
        given = read(first.config)
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"{first.config}: no settings {', '.join(unknown)}; see --help")
        parser.set_defaults(**given)
    return parser.parse_args(argv)


def read(path: Path) -> dict[str, Any]:
    """Read a flat YAML file, `learning-rate` and `learning_rate` alike."""
    import yaml

    found = yaml.safe_load(path.read_text()) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def hf_options(parser: argparse.ArgumentParser, output: str) -> None:
    """Add what every recipe on the HF Trainer takes."""
    add = parser.add_argument_group("training").add_argument
    add("--budget", type=int, default=2048, help="tokens a pack may hold")
    add("--epochs", type=float, default=1.0, help="passes over the data")
    add("--steps", type=int, default=-1, help="optimizer steps; overrides --epochs")
    add("--accumulation", type=int, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=float, default=2e-5, help="at its peak")
    add("--warmup", type=int, default=10, help="steps until the peak")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add("--attention", default="nopad", help="nopad, flash_attention_2, sdpa or eager")
    add("--compile", action="store_true", help="compile the decoder layer; T is then constant")
    add("--checkpointing", action="store_true", help="recompute activations to save memory")
    add("--workers", type=int, default=0, help="data loading processes per rank")
    add("--seed", type=int, default=0, help="of the order of packs, and of new weights")
    add = parser.add_argument_group("run").add_argument
    add("--output", default=output, help="folder of checkpoints and of the model")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint there")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--log-every", type=int, default=10, help="steps between lines of the log")
    add("--log-with", default="none", help="tensorboard, wandb, ...")


def hf_arguments(args: argparse.Namespace):
    """Put these settings into the words of the HF Trainer."""
    from transformers import TrainingArguments

    return TrainingArguments(
        args.output,
        max_steps=args.steps,
        num_train_epochs=args.epochs,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        gradient_checkpointing=args.checkpointing,
        dataloader_num_workers=args.workers,
        seed=args.seed,
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=args.log_every,
        report_to=args.log_with,
    )


def hf_train(args: argparse.Namespace, model, data, tokenizer) -> None:
    """Train on packs with the HF Trainer; stop when asked, and leave a model that loads."""
    from nopad.collators import PackedCollator
    from nopad.trainer.compiling import compile_layers
    from nopad.trainer.with_hf import PackedTrainer, StopCallback

    trainer = PackedTrainer(
        model,
        hf_arguments(args),
        PackedCollator(fill=args.compile),
        data,
        processing_class=tokenizer,
        callbacks=[StopCallback()],
    )
    if args.compile:
        compile_layers(model)
    trainer.train(resume_from_checkpoint=args.resume or None)
    whole = trainer.state.global_step >= trainer.state.max_steps
    if whole:
        trainer.save_model()
    if trainer.is_world_process_zero():
        say = "done" if whole else "stopped, go on with --resume"
        print(f"{say}: {trainer.args.output_dir}, step {trainer.state.global_step}")
