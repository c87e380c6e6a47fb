"""Pretrain a causal LM on packed documents with Lightning.

nopad pretrain-lightning       # a small Llama on Python's standard library
nopad pretrain-lightning --devices 2 --accelerator cpu --data corpus.jsonl --resume
"""

from __future__ import annotations

import sys
from argparse import Namespace

from nopad.cli import count, number_from_0, positive
from nopad.cli import parser as command_parser
from nopad.recipes.support import arguments
from nopad.recipes.support.data_and_model import load_data, load_model
from nopad.recipes.support.run_dir import RunDir
from nopad.recipes.support.run_recipe import run_recipe


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = command_parser("pretrain-lightning", "[MODEL] [options]", __doc__)
    arguments.add_data_and_model_options(parser, budget=2048)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=150, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=4e-3, help="peak learning rate")
    add("--warmup", type=count, default=10, help="warmup steps")
    add("--precision", default="32-true", help="precision, by Lightning's name")
    add("--accelerator", default="auto", help="cpu, gpu, ...")
    add("--devices", type=positive, default=1, help="processes on this machine")
    add("--strategy", default="auto", help="ddp, fsdp, ...")
    add = parser.add_argument_group("run").add_argument
    arguments.add_run_options(add, "pretrain_lightning", save_every=50)
    add("--eval-every", type=positive, default=50, help="steps between evaluations by generation")
    return arguments.parse_with_config(parser, argv, "pretrain_lightning")


def lightning_module(args: Namespace, run: RunDir, model):
    """Wrap the model in a minimal LightningModule: a training step and an optimizer."""
    import lightning.pytorch as pl
    import torch
    from transformers import get_cosine_schedule_with_warmup

    class CausalLM(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            run.start(self.trainer.is_global_zero)
            return self.model(**batch).loss

        def configure_optimizers(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            optimizer = torch.optim.AdamW(self.parameters(), args.learning_rate, (0.9, 0.95))
            schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return CausalLM()


def train(args: Namespace, run: RunDir) -> None:
    """Train until `--steps` or a signal, with evaluations and checkpoints."""
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from nopad.recipes.support.holdout import continuation_evals
    from nopad.trainer import latest_intact_archive
    from nopad.trainer.monitoring import check_weights
    from nopad.trainer.with_lightning import (
        EvalCallback,
        PackedCallback,
        PackedDataModule,
        StopCallback,
        save_pretrained,
    )

    stop = StopCallback(run.path / "last.ckpt")
    ckpt_path = latest_intact_archive(run.path) if args.resume else None
    pl.seed_everything(args.seed, verbose=False)
    tokenizer, dataset, examples = load_data(args)
    ranks = {"num_workers": args.workers, "sequence_parallel": args.sequence_parallel}
    data = PackedDataModule(dataset, **ranks)
    model = load_model(args, tokenizer)
    evals = continuation_evals(args, model, tokenizer, examples)
    # Without versions, last.ckpt is the newest checkpoint also after a resume.
    save = {"every_n_train_steps": args.save_every, "enable_version_counter": False}
    checkpoints = pl.callbacks.ModelCheckpoint(run.path, save_last=True, **save)
    launch = {k: getattr(args, k) for k in ("accelerator", "devices", "strategy", "precision")}
    try:
        trainer = pl.Trainer(
            **launch,
            max_steps=args.steps,
            accumulate_grad_batches=args.accumulation,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            callbacks=[PackedCallback(data), stop, checkpoints, EvalCallback(*evals, console=True)],
            enable_model_summary=False,
            default_root_dir=run.path,
        )
    except MisconfigurationException as error:
        raise ValueError(error) from error
    module = lightning_module(args, run, model)
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    check_weights(module, f"step {trainer.global_step}")
    what = f"{run.path}, step {trainer.global_step}"
    if finished := trainer.global_step == args.steps:
        trainer.save_checkpoint(run.path / "last.ckpt", weights_only=False)
        save_pretrained(trainer, run.path / "model", tokenizer)
        what += f"; model: {run.path / 'model'}, for from_pretrained and nopad generate"
    if trainer.is_global_zero:
        run.print_end(what, finished)


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain_lightning", parse_args, train))
