"""Pretrain a causal LM on packs, generating from the live model on the way.

    accelerate launch recipes/pretrain.py                 # a small Llama on Python's own sources
    accelerate launch recipes/pretrain.py --data corpus.jsonl --model path/to/config --budget 8192
    accelerate launch recipes/pretrain.py --resume        # go on where the last run stopped

Two processes on a CPU (there, a plain `--num_processes 2` would silently start one):

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 recipes/pretrain.py
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys

from nopad.cli import HelpFormatter, count, positive
from nopad.recipes.support.arguments import Training, parse, run_recipe
from nopad.recipes.support.data_and_model import data_options, load_data, load_model
from nopad.recipes.support.run_dir import RunFolder, run_options

RATES_EVERY = 10
"""Steps: to read the rates of a stream goes over all of it so far. The first steps, which are slow
and few, are read one by one."""


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description="Pretrain a causal LM on packs, generating from the live model on the way.",
        formatter_class=HelpFormatter,
    )
    data_options(parser, budget=512)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=800, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=float, default=6e-3, help="at its peak")
    add("--warmup", type=count, default=40, help="steps until the peak")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add = parser.add_argument_group("run").add_argument
    run_options(add, "pretrain")
    add("--save-every", type=positive, default=200, help="steps between checkpoints")
    add("--keep", type=positive, help="newest checkpoints to keep; without it, all")
    add("--eval-every", type=positive, default=400, help="steps between generations")
    add("--prompt", action="append", help="what to continue then, may be repeated; without it, "
        "beginnings of documents held out of the data")  # fmt: skip
    add("--log-with", choices=["tensorboard", "wandb"], help="where losses and rates go")
    return parse(parser, argv, "pretrain")


def optimize(args: argparse.Namespace, model, clips: bool):
    """AdamW with decay on matrices only, warm-up and cosine; `clips` on the way."""
    import torch
    from nopad.trainer.fused import ClippedAdamW
    from transformers import get_cosine_schedule_with_warmup

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rule = {"lr": args.learning_rate, "betas": (0.9, 0.95)}
    if clips:
        optimizer = ClippedAdamW(groups, max_norm=args.clip, **rule)
    else:
        optimizer = torch.optim.AdamW(groups, **rule)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)


def start(args: argparse.Namespace):
    """Accelerate, with the threads and the seed of this run."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = max(1, (os.cpu_count() or 1) // local)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # launchers say 1, and BLAS reads it as it loads
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else ranks on a CPU would not find each other
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulation,
        log_with=args.log_with,
        project_dir=args.output,
        step_scheduler_with_optimizer=False,
    )
    if args.log_with and not accelerator.log_with:  # Accelerate would go on without a word
        raise ValueError(f"--log-with {args.log_with}: pip install {args.log_with}")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}: "
            "see the lines at the top of this recipe for what starts several"
        )
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"{accelerator.distributed_type.value} clips by its own settings, not by --clip: "
            "choose DDP or FSDP in `accelerate config`, or take recipes/train_hf.py"
        )
    torch.set_num_threads(threads)
    set_seed(args.seed)
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are fine
    return accelerator


def optimizer_clips(accelerator) -> bool:
    """FSDP1 leaves each rank a piece of the gradient; only Accelerate knows the norm of all."""
    return accelerator.distributed_type != "FSDP" or accelerator.is_fsdp2


class Pretraining:
    """One run: the parts, the loop over optimizer steps, and its checkpoints."""

    def __init__(self, args: argparse.Namespace, folder: RunFolder, accelerator):
        from nopad.trainer import StopRequest
        from nopad.trainer.fused import fuse_layers
        from nopad.trainer.loss import attach_loss
        from nopad.trainer.monitoring import Meter
        from nopad.trainer.with_accelerate import PackedAccelerateLoader

        self.args, self.folder, self.accelerator = args, folder, accelerator
        self.stop = StopRequest()
        with accelerator.main_process_first():
            self.tokenizer, dataset, self.examples = load_data(args)
        model = load_model(args, self.tokenizer)
        fuse_layers(model, accelerator.device)
        self.loss = attach_loss(model)
        self.clips = optimizer_clips(accelerator)
        optimizer, scheduler = optimize(args, model, self.clips)
        self.loader = PackedAccelerateLoader(accelerator, dataset, num_workers=args.workers)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            model, optimizer, scheduler
        )
        self.meter = Meter.of(self.loader, model)
        self.evaluations = self._evaluations()
        self.stopping = False
        self.losses: list[float] = []
        self.rates: dict[str, float] = {}
        self.step = 0

    def _evaluations(self):
        """Continue beginnings of held-out documents with the live model, on all ranks."""
        from nopad.recipes.support.holdout import continuing
        from nopad.trainer.evaluation import Example
        from nopad.trainer.with_accelerate import AccelerateEval

        args, model = self.args, self.accelerator.unwrap_model(self.model)
        examples = [Example(prompt) for prompt in args.prompt or []] or self.examples
        evaluation = continuing(model, self.tokenizer, examples, args.eval_every, args.seed)
        return AccelerateEval(
            self.accelerator, self.model, evaluation, meter=self.meter, console=True
        )

    def say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            from tqdm import tqdm

            tqdm.write(text)

    def describe(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        ranks = self.accelerator.num_processes
        self.say(
            f"{self.accelerator.unwrap_model(self.model).config.model_type}, "
            f"{parameters / 1e6:.1f} M parameters, vocabulary {len(self.tokenizer)}, "
            f"attention {self.args.attention}, packs of {self.args.budget} tokens, "
            f"{ranks} process{'es' if ranks > 1 else ''} on {self.accelerator.device.type} "
            f"-> {self.folder.path}"
        )

    def resume(self) -> None:
        step = self.folder.last_step()
        self.accelerator.load_state(str(self.folder.checkpoint(step)))
        self.step = step
        if self.accelerator.is_main_process:
            self.folder.forget_after(step)
        self.say(f"resumed {self.folder.path} at step {step}")

    def train(self) -> None:
        from tqdm import tqdm

        losses, silent = [], not self.accelerator.is_main_process
        shown = {"total": self.args.steps, "initial": self.step, "unit": "step"}
        with tqdm(**shown, dynamic_ncols=True, disable=silent) as bar:
            for number, batch in enumerate(self.loader):
                if self.step >= self.args.steps or self.stopping:
                    break
                if number == 0:
                    self.begin()
                losses.append(self.backward(batch))
                self.meter.add(self.loader.last_pack, batch["labels"], self.loss.token_losses)
                if self.accelerator.sync_gradients:
                    self.step += 1
                    self.report(bar, losses)
                    losses.clear()
                    self.after_step()

    def begin(self) -> None:
        """Take the folder: a run whose first batch is there was refused by no check."""
        if self.accelerator.is_main_process:
            self.folder.start()
        if self.args.log_with:
            self.accelerator.init_trackers("pretrain")
        Training.begun = True
        self.meter.reset()  # checking the start and making trackers is no training

    def backward(self, batch: dict):
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            if not self.clips and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def report(self, bar, losses: list) -> None:
        import torch

        loss = self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {self.step}: lower --learning-rate")
        self.losses.append(loss)
        values = {"loss": loss, "learning_rate": self.scheduler.get_last_lr()[0]}
        early, last = len(self.losses) < RATES_EVERY, self.step == self.args.steps
        if early or last or self.step % RATES_EVERY == 0:
            self.rates = self.meter.read()
            values |= self.rates
        bar.update()
        bar.set_postfix_str(
            f"loss {loss:.3f}, {self.rates['tokens_per_second']:.0f} tok/s, "
            f"fill {self.rates['fill']:.2%}, {self.rates['samples_per_pack']:.1f} samples/pack"
        )
        self.accelerator.log(values, self.step)
        if self.accelerator.is_main_process:
            self.folder.log(self.step, values)

    def after_step(self) -> None:
        self.stopping = self.stop.should_stop()
        last = self.step == self.args.steps
        if not self.stopping:
            self.evaluations.after_step(self.step, last)
        if self.step % self.args.save_every == 0 or last or self.stopping:
            self.save()

    def save(self) -> None:
        """A folder that resumes this run, and that `AutoModelForCausalLM.from_pretrained` loads."""
        folder = self.folder.unfinished(self.step)
        if self.accelerator.is_main_process:
            self.folder.begin()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(folder))
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            self.folder.finish(self.step, self.args.keep)
        self.accelerator.wait_for_everyone()


def main(argv: list[str] | None = None) -> None:
    """Train as the options say; what the user can mend comes out as a ValueError."""
    args = options(argv)
    folder = RunFolder.of("pretrain", args)
    accelerator = start(args)
    run = Pretraining(args, folder, accelerator)
    run.describe()
    if args.resume:
        run.resume()
    run.train()
    if run.losses:
        recent = run.losses[-50:]
        run.say(
            f"loss {run.losses[0]:.2f} -> {sum(recent) / len(recent):.2f}, mean of {len(recent)}"
        )
    ended = "stopped, go on with --resume" if run.step < args.steps else "done"
    run.say(f"{ended}: {folder.checkpoint(run.step)}")
    del run  # DDP goes before the group of ranks does: see `destroy_group`
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain", main))
