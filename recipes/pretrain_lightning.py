"""Pretrain a causal LM on packs with Lightning.

python recipes/pretrain_lightning.py      # a small Llama on Python's sources
python recipes/pretrain_lightning.py --devices 2 --accelerator cpu --data corpus.jsonl
python recipes/pretrain_lightning.py --config run.yaml --resume
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nopad.cli import HelpFormatter, count, positive
from nopad.recipes.support.arguments import Training, heard_to_the_end, mendable, parse, run_recipe
from nopad.recipes.support.data_and_model import data_options, load_data, load_model
from nopad.recipes.support.holdout import continuing
from nopad.recipes.support.run_dir import RunFolder, run_options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    data_options(parser, budget=2048)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=150, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=float, default=4e-3, help="at its peak")
    add("--warmup", type=count, default=10, help="steps until the peak")
    add("--precision", default="32-true", help="as Lightning names it")
    add("--accelerator", default="auto", help="cpu, gpu, ...")
    add("--devices", type=positive, default=1, help="processes on this machine")
    add("--strategy", default="auto", help="ddp, fsdp, ...")
    add = parser.add_argument_group("run").add_argument
    run_options(add, "pretrain_lightning")
    add("--save-every", type=positive, default=50, help="steps between checkpoints")
    add("--eval-every", type=positive, default=50, help="steps between generations")
    return parse(parser, argv, "pretrain_lightning")


def module(args: argparse.Namespace, folder: RunFolder, model):
    """The smallest Lightning module: a forward, and an optimizer with its schedule."""
    import lightning.pytorch as pl
    import torch
    from transformers import get_cosine_schedule_with_warmup

    class CausalLM(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            if self.trainer.is_global_zero:
                folder.start()
            Training.begun = True
            return self.model(**batch).loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), args.learning_rate, (0.9, 0.95))
            schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return CausalLM()


def checkpoint(args: argparse.Namespace) -> Path | None:
    """The file to go on from, if any; damaged ones are refused."""
    from nopad.trainer import check_archive

    if args.resume is None:
        return None
    path = args.output / "last.ckpt"
    if not path.is_file():
        raise ValueError(f"there is no {path} to go on from: start a new run")
    check_archive(path)
    return path


def main(argv: list[str] | None = None) -> None:
    """Train as the options say."""
    args = options(argv)
    folder = RunFolder.of("pretrain_lightning", args)
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from nopad.trainer.with_lightning import (
        EvalCallback,
        PackedCallback,
        PackedDataModule,
        StopCallback,
    )

    with heard_to_the_end(), mendable(MisconfigurationException):
        stop = StopCallback(args.output / "last.ckpt")
        resumed = checkpoint(args)
        pl.seed_everything(args.seed, verbose=False)
        tokenizer, dataset, examples = load_data(args)
        data = PackedDataModule(dataset, num_workers=args.workers)
        # Without versions, last.ckpt is the last, also after a resume.
        often = {"every_n_train_steps": args.save_every, "enable_version_counter": False}
        checkpoints = pl.callbacks.ModelCheckpoint(args.output, save_last=True, **often)
        model = load_model(args, tokenizer)
        beside = continuing(model, tokenizer, examples, args.eval_every, args.seed)
        on = {k: getattr(args, k) for k in ("accelerator", "devices", "strategy", "precision")}
        trainer = pl.Trainer(
            **on,
            max_steps=args.steps,
            accumulate_grad_batches=args.accumulation,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            callbacks=[PackedCallback(data), stop, checkpoints, EvalCallback(beside, console=True)],
            enable_model_summary=False,
            default_root_dir=args.output,
        )
        trainer.fit(module(args, folder, model), data, ckpt_path=resumed, weights_only=True)
        if whole := trainer.global_step == args.steps:
            trainer.save_checkpoint(args.output / "last.ckpt", weights_only=False)
        if trainer.is_global_zero:
            say = "done" if whole else "stopped, go on with --resume"
            print(f"{say}: {args.output}, step {trainer.global_step}")


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain_lightning", main))
