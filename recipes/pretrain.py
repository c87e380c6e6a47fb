"""Pretrain a causal LM on packs with Accelerate, and generate from the live model on the way.

    nopad pretrain                 # a small Llama on functions of Python's standard library
    nopad pretrain path/to/config --data corpus.jsonl --budget 8192
    nopad pretrain --resume        # continue the last run under runs/; or --resume FOLDER
    accelerate launch -m nopad pretrain ...         # on several devices, as configured

Two processes on a CPU (`--num_processes 2` alone silently starts one process there):

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m nopad pretrain
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from nopad.cli import count, number_above_0, number_from_0, positive
from nopad.cli import parser as command_parser
from nopad.recipes.support.arguments import parse_with_config
from nopad.recipes.support.data_and_model import (
    add_data_and_model_options,
    add_eval_option,
    eval_metric,
    load_data,
    load_model,
)
from nopad.recipes.support.run_dir import EVAL_LOG, RunDir, RunProgress, add_run_options
from nopad.recipes.support.run_recipe import run_recipe

RATE_INTERVAL = 10
"""Steps between readings of the throughput, which cost time with streamed data. The first steps,
which are few and slow, are read one by one."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("pretrain", "[MODEL] [options]", __doc__)
    add_data_and_model_options(parser, budget=1024)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=480, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=6e-3, help="peak learning rate")
    add("--warmup", type=count, default=30, help="warmup steps")
    add("--weight-decay", type=number_from_0, default=0.1, help="weight decay of matrices")
    add("--clip", type=number_above_0, default=1.0, help="maximum gradient norm; inf: none")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add = parser.add_argument_group("run").add_argument
    add_run_options(add, "pretrain")
    add("--save-every", type=positive, default=240, help="steps between checkpoints")
    add("--keep", type=positive, help="number of newest checkpoints to keep; default: all")
    add_eval_option(add, every=80)
    add("--prompt", action="append", help="prompt to continue in evaluations, may be repeated; "
        "default: beginnings of held-out documents")  # fmt: skip
    add("--log-with", choices=["tensorboard", "wandb"], help="tracker of losses and rates")
    return parse_with_config(parser, argv, "pretrain")


def build_optimizer(args: argparse.Namespace, model, fused: bool):
    """Build AdamW, with weight decay on matrices only, and a cosine schedule with warmup."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=fused)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)


def create_accelerator(args: argparse.Namespace):
    """Create the Accelerator; set threads and seed; raise for a launch that would train wrongly."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = max(1, (os.cpu_count() or 1) // local_ranks)
    # Launchers set 1, and BLAS reads the variable when torch loads it.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # otherwise CPU ranks do not form a group
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulation,
        log_with=args.log_with,
        project_dir=args.output,
        step_scheduler_with_optimizer=False,
    )
    if args.log_with and not accelerator.log_with:  # Accelerate only warns
        raise ValueError(f"--log-with {args.log_with}: pip install {args.log_with}")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}: "
            "nopad pretrain --help shows how to launch several"
        )
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"{accelerator.distributed_type.value} clips gradients by its own settings, not by "
            "--clip: choose DDP or FSDP in `accelerate config`, or use nopad train-hf"
        )
    if getattr(accelerator.parallelism_config, "tp_size", 1) > 1:
        raise ValueError("tensor parallelism: use nopad train-hf, which loads models for it")
    torch.set_num_threads(threads)
    set_seed(args.seed)
    # Accelerate warns about tied weights at every save; they are saved correctly.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    return accelerator


class Pretraining:
    """One run: model, optimizer, loader and evaluation; the training loop; its checkpoints."""

    def __init__(self, args: argparse.Namespace, run_dir: RunDir, accelerator):
        from nopad.recipes.support.run_summary import expected_padded_fill
        from nopad.trainer import StopRequest
        from nopad.trainer.loss import attach_loss
        from nopad.trainer.monitoring import ThroughputMeter
        from nopad.trainer.with_accelerate import PackedAccelerateLoader

        self.args, self.run_dir, self.accelerator = args, run_dir, accelerator
        self.stop = StopRequest()
        with accelerator.main_process_first():
            self.tokenizer, dataset, self.examples = load_data(args)
        self.padded_fill = expected_padded_fill(
            dataset, args.budget, args.overflow, args.max_length
        )
        model = load_model(args, self.tokenizer)
        self.loss = attach_loss(model)
        on_gpu = accelerator.device.type == "cuda"
        optimizer, scheduler = build_optimizer(args, model, fused=on_gpu)
        self.loader = PackedAccelerateLoader(
            accelerator,
            dataset,
            num_workers=args.workers,
            continue_on_nan=args.continue_on_nan,
            sequence_parallel=args.sequence_parallel,
        )
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            model, optimizer, scheduler
        )
        self.meter = ThroughputMeter.of(self.loader, model)
        self.evaluation = self._build_evaluation()
        self.stopping = False
        self.num_logged = 0
        self.rates: dict[str, float] = {}
        self.step = 0

    def _build_evaluation(self):
        """Build the evaluation that continues prompts with the live model, on all ranks."""
        from nopad.recipes.support.holdout import continuation_eval
        from nopad.trainer.evaluation import Example
        from nopad.trainer.with_accelerate import AccelerateEval

        args, model = self.args, self.accelerator.unwrap_model(self.model)
        examples = [Example(prompt) for prompt in args.prompt or []] or self.examples
        settings = {"every": args.eval_every, "seed": args.seed, "metric": eval_metric(args)}
        evaluation = continuation_eval(model, self.tokenizer, examples, **settings)
        self.metric = evaluation.monitor
        return AccelerateEval(
            self.accelerator, self.model, evaluation, meter=self.meter, console=True
        )

    def print(self, text: str) -> None:
        """Print a line above the progress bar, on the main process."""
        if self.accelerator.is_main_process:
            from tqdm import tqdm

            tqdm.write(text)

    def print_start(self) -> None:
        from nopad.recipes.support.run_summary import padding_line

        num_parameters = sum(p.numel() for p in self.model.parameters())
        ranks = self.accelerator.num_processes
        self.print(
            f"{self.accelerator.unwrap_model(self.model).config.model_type}, "
            f"{num_parameters / 1e6:.1f} M parameters, vocabulary {len(self.tokenizer)}, "
            f"attention {self.args.attention}, packs of {self.args.budget} tokens, "
            f"{ranks} process{'es' if ranks > 1 else ''} on {self.accelerator.device.type} "
            f"-> {self.run_dir.path}"
        )
        self.print(padding_line(self.padded_fill, self.args.budget))

    def print_end(self) -> None:
        """Print what the run did in five lines; leave a plot of it in the run folder."""
        from nopad.recipes.support.run_summary import plot, summary_lines

        if not self.accelerator.is_main_process:
            return
        log, evaluations = self.run_dir.read_log(), self.run_dir.read_log(EVAL_LOG)
        if not log:
            return
        figures = (log, evaluations, self.metric, self.padded_fill, self.args.budget)
        self.print("\n".join(summary_lines(*figures)))
        path = self.run_dir.path / "training.svg"
        path.write_text(plot(self.run_dir.path.name, *figures), encoding="utf-8")
        self.print(f"plot: {path}")

    def resume(self) -> None:
        step = self.run_dir.latest_step()
        self.accelerator.load_state(str(self.run_dir.checkpoint_path(step)))
        self.step = step
        if self.accelerator.is_main_process:
            self.run_dir.truncate_log(step)
        self.print(f"resumed {self.run_dir.path} at step {step}")

    def train(self) -> None:
        from tqdm import tqdm

        results, disable = [], not self.accelerator.is_main_process
        progress = {"total": self.args.steps, "initial": self.step, "unit": "step"}
        with tqdm(**progress, dynamic_ncols=True, disable=disable) as bar:
            for index, batch in enumerate(self.loader):
                if self.step >= self.args.steps or self.stopping:
                    break
                if index == 0:
                    self.on_first_batch()
                loss, pack = self.backward(batch), self.loader.last_pack
                assert pack is not None
                results.append((loss, int(pack.lengths.sum()), len(pack.lengths)))
                self.meter.add(pack, batch["labels"], self.loss.token_losses)
                if self.accelerator.sync_gradients:
                    self.step += 1
                    self.log_step(bar, *zip(*results, strict=True))
                    results.clear()
                    self.after_step()

    def on_first_batch(self) -> None:
        """Create the run folder: with the first batch, the loader has passed all its checks."""
        is_main = self.accelerator.is_main_process
        if is_main:
            self.run_dir.create()  # trackers write into it
        if self.args.log_with:
            self.accelerator.init_trackers("pretrain")
        self.run_dir.start_training(is_main)
        if self.step == 0:
            self.evaluate(last=True)  # what the later evaluations are compared with
        self.meter.reset()  # do not count checks, trackers and this evaluation as training time

    def backward(self, batch: dict):
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def log_step(self, bar, losses: tuple, tokens: tuple, samples: tuple) -> None:
        """Update the progress bar, the tracker and log.jsonl; each tuple has a value per pack."""
        import torch
        from nopad.trainer.monitoring import raise_if_not_finite, tracker_tags

        loss = torch.stack(losses).mean()
        counts = loss.new_tensor([sum(tokens), sum(samples), len(losses)])
        # Sequence-parallel ranks count the same packs.
        counts *= self.meter.ranks / self.accelerator.num_processes
        # One collective and one transfer per step.
        loss, *counts = self.accelerator.reduce(torch.cat([loss[None], counts]), "sum").tolist()
        loss /= self.accelerator.num_processes
        if not self.args.continue_on_nan:
            raise_if_not_finite(loss, f"step {self.step}")
        values = {"loss": loss, "learning_rate": self.scheduler.get_last_lr()[0]}
        values |= zip(("tokens", "samples", "packs"), map(round, counts), strict=True)
        self.num_logged += 1
        is_early, is_last = self.num_logged < RATE_INTERVAL, self.step == self.args.steps
        if is_early or is_last or self.step % RATE_INTERVAL == 0:
            self.rates = self.meter.read()
            values |= self.rates
        bar.update()
        bar.set_postfix_str(
            f"loss {loss:.3f}, {self.rates['tokens_per_second']:.0f} tok/s, "
            f"fill {self.rates['fill']:.2%}, {self.rates['samples_per_pack']:.1f} samples/pack"
        )
        self.accelerator.log(tracker_tags(values), self.step)
        if self.accelerator.is_main_process:
            self.run_dir.log(self.step, values)

    def after_step(self) -> None:
        """Evaluate, save or stop."""
        self.stopping = self.stop.should_stop()
        is_last = self.step == self.args.steps
        if not self.stopping:
            self.evaluate(is_last)
        if self.step % self.args.save_every == 0 or is_last or self.stopping:
            self.save()

    def evaluate(self, last: bool = False) -> None:
        """Evaluate if it is time, or at the first and last step; log the metrics."""
        for report in self.evaluation.after_step(self.step, last):
            if self.accelerator.is_main_process and report.metrics:
                self.run_dir.log(self.step, report.metrics, EVAL_LOG)

    def save(self) -> None:
        """Write a checkpoint to resume from, which `from_pretrained` loads as a model too."""
        if not self.loader.finite_check.may_save(self.model, f"step {self.step}"):
            return
        path = self.run_dir.unfinished_path(self.step)
        if self.accelerator.is_main_process:
            self.run_dir.remove_unfinished()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(path))
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).config.save_pretrained(path)
            self.tokenizer.save_pretrained(path)
            self.run_dir.commit_checkpoint(self.step, self.args.keep)
        self.accelerator.wait_for_everyone()


def main(argv: list[str] | None = None, progress: RunProgress | None = None) -> None:
    """Train; an error that the user can fix is a ValueError, OSError or ImportError."""
    args = parse_args(argv)
    run_dir = RunDir.from_args("pretrain", args, progress)
    accelerator = create_accelerator(args)
    from nopad.trainer.monitoring import check_weights

    run = Pretraining(args, run_dir, accelerator)
    run.print_start()
    if args.resume:
        run.resume()
    run.train()
    check_weights(run.model, f"step {run.step}")
    run.print_end()
    checkpoint = str(run_dir.checkpoint_path(run.step))
    finished = run.step >= args.steps
    run.print(f"done: {checkpoint}" if finished else run_dir.stop_line(checkpoint))
    del run  # DDP must be gone before the process group: see `destroy_group`
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain", main))
