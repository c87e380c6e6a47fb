"""Pretrain a causal LM on packed documents with Lightning.

nopad pretrain-lightning       # a small Llama on Python's standard library
nopad pretrain-lightning --devices 2 --accelerator cpu --data corpus.jsonl --resume
"""

from __future__ import annotations

import sys
from argparse import Namespace

from nopad.cli import count, number_from_0, positive
from nopad.cli import parser as command_parser
from nopad.recipes.support import data_and_model as setup
from nopad.recipes.support.arguments import parse_with_config
from nopad.recipes.support.run_dir import RunDir, RunProgress, add_run_options
from nopad.recipes.support.run_recipe import as_user_error, hold_signals, run_recipe


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = command_parser("pretrain-lightning", "[MODEL] [options]", __doc__)
    setup.add_data_and_model_options(parser, budget=2048)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=150, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=4e-3, help="peak learning rate")
    add("--warmup", type=count, default=10, help="warmup steps")
    add("--precision", default="32-true", help="Lightning's name of a precision")
    add("--accelerator", default="auto", help="cpu, gpu, ...")
    add("--devices", type=positive, default=1, help="processes on this machine")
    add("--strategy", default="auto", help="ddp, fsdp, ...")
    add = parser.add_argument_group("run").add_argument
    add_run_options(add, "pretrain_lightning")
    add("--save-every", type=positive, default=50, help="steps between checkpoints")
    setup.add_eval_option(add, every=50)
    return parse_with_config(parser, argv, "pretrain_lightning")


def lightning_module(args: Namespace, run_dir: RunDir, model):
    """Wrap the model in a minimal LightningModule: a training step and an optimizer."""
    import lightning.pytorch as pl
    import torch
    from transformers import get_cosine_schedule_with_warmup

    class CausalLM(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            run_dir.start_training(self.trainer.is_global_zero)
            return self.model(**batch).loss

        def configure_optimizers(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            optimizer = torch.optim.AdamW(self.parameters(), args.learning_rate, (0.9, 0.95))
            schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return CausalLM()


def main(argv: list[str] | None = None, progress: RunProgress | None = None) -> None:
    """Train; an error that the user can fix is a ValueError, OSError or ImportError."""
    args = parse_args(argv)
    run_dir = RunDir.from_args("pretrain_lightning", args, progress)
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from nopad.recipes.support.holdout import continuation_eval
    from nopad.trainer import latest_intact_archive
    from nopad.trainer.monitoring import check_weights
    from nopad.trainer.with_lightning import (
        EvalCallback,
        PackedCallback,
        PackedDataModule,
        StopCallback,
        save_pretrained,
    )

    with hold_signals(), as_user_error(MisconfigurationException):
        stop = StopCallback(args.output / "last.ckpt")
        ckpt_path = latest_intact_archive(args.output) if args.resume else None
        pl.seed_everything(args.seed, verbose=False)
        tokenizer, dataset, examples = setup.load_data(args)
        data = PackedDataModule(
            dataset, num_workers=args.workers, sequence_parallel=args.sequence_parallel
        )
        # Without versions, last.ckpt is the newest checkpoint also after a resume.
        save = {"every_n_train_steps": args.save_every, "enable_version_counter": False}
        checkpoints = pl.callbacks.ModelCheckpoint(args.output, save_last=True, **save)
        model = setup.load_model(args, tokenizer)
        settings = (args.eval_every, args.seed, setup.eval_metric(args))
        evaluation = EvalCallback(
            continuation_eval(model, tokenizer, examples, *settings), console=True
        )
        packed = PackedCallback(data, continue_on_nan=args.continue_on_nan)
        launch = {k: getattr(args, k) for k in ("accelerator", "devices", "strategy", "precision")}
        trainer = pl.Trainer(
            **launch,
            max_steps=args.steps,
            accumulate_grad_batches=args.accumulation,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            callbacks=[packed, stop, checkpoints, evaluation],
            enable_model_summary=False,
            default_root_dir=args.output,
        )
        module = lightning_module(args, run_dir, model)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        check_weights(module, f"step {trainer.global_step}")
        if finished := trainer.global_step == args.steps:
            trainer.save_checkpoint(args.output / "last.ckpt", weights_only=False)
            save_pretrained(trainer, args.output / "model", tokenizer)
        if trainer.is_global_zero:
            reached = f"{args.output}, step {trainer.global_step}"
            model_dir = f"; model: {args.output / 'model'}, for from_pretrained and nopad generate"
            print(f"done: {reached}{model_dir}" if finished else run_dir.stop_line(reached))


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain_lightning", main))
