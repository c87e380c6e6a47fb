"""Pretrain a causal LM on packs with Accelerate, and evaluate the live model by generation.

    nopad pretrain                 # a small Llama on functions of Python's standard library
    nopad pretrain path/to/config --data corpus.jsonl --budget 8192
    nopad pretrain --resume        # continue the last run under runs/; or --resume FOLDER
    accelerate launch -m nopad pretrain ...         # on several devices, as configured
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m nopad pretrain

The last line starts two processes on a CPU, where `--num_processes 2` alone would start one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from nopad.cli import count, number_above_0, number_from_0, positive
from nopad.cli import parser as command_parser
from nopad.recipes.support import arguments
from nopad.recipes.support.data_and_model import load_data, load_model
from nopad.recipes.support.run_dir import EVAL_LOG, RunDir
from nopad.recipes.support.run_recipe import run_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("pretrain", "[MODEL] [options]", __doc__)
    arguments.add_data_and_model_options(parser, budget=1024)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=480, help="optimizer steps")
    add("--accumulation", type=positive, default=1, help="packs per rank and optimizer step")
    add("--learning-rate", type=number_from_0, default=6e-3, help="peak learning rate")
    add("--warmup", type=count, default=30, help="warmup steps")
    add("--weight-decay", type=number_from_0, default=0.1, help="weight decay of matrices")
    add("--clip", type=number_above_0, default=1.0, help="maximum gradient norm; inf: none")
    add("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    add = parser.add_argument_group("run").add_argument
    arguments.add_run_options(add, "pretrain", save_every=240)
    add("--keep", type=positive, help="number of newest checkpoints to keep; default: all")
    add("--eval-every", type=positive, default=80, help="steps between evaluations by generation")
    add("--prompt", action="append", help="prompt to continue in evaluations, may be repeated; "
        "default: beginnings of held-out documents")  # fmt: skip
    add("--log-with", choices=["tensorboard", "wandb"], help="tracker of losses and rates")
    return arguments.parse_with_config(parser, argv, "pretrain")


def create_accelerator(args: argparse.Namespace):
    """Create the Accelerator; raise for a launch that would train wrongly."""
    import torch
    from accelerate import Accelerator

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
    ranks, launched = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", 1))
    if ranks != launched:
        raise ValueError(f"Accelerate sees {ranks} of {launched} processes: see --help")
    kind = accelerator.distributed_type
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(f"{kind.value} clips gradients by its own settings: use nopad train-hf")
    if getattr(accelerator.parallelism_config, "tp_size", 1) > 1:
        raise ValueError("tensor parallelism: use nopad train-hf, which loads models for it")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))  # launchers set 1
    # Accelerate warns about tied weights at every save; they are saved correctly.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    return accelerator


def build_optimizer(args: argparse.Namespace, model, fused: bool):
    """Build AdamW, with weight decay on matrices only, and a cosine schedule with warmup."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    decay = {"weight_decay": args.weight_decay}
    groups = [{"params": matrices, **decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=fused)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)


def train(args: argparse.Namespace, run: RunDir) -> None:
    """Train until `--steps` or a signal, with evaluations and checkpoints."""
    from accelerate.utils import set_seed
    from nopad import AccelerateEval, Example, PackedAccelerateLoader
    from nopad.recipes.support.holdout import continuation_evals
    from nopad.recipes.support.run_summary import expected_padded_fill, write_summary
    from nopad.trainer import StopRequest, ThroughputMeter
    from nopad.trainer.monitoring import check_weights, raise_if_not_finite, tracker_tags
    from nopad.trainer.with_accelerate import load_checkpoint, save_checkpoint
    from tqdm import tqdm

    accelerator = create_accelerator(args)
    is_main, device = accelerator.is_main_process, accelerator.device.type
    set_seed(args.seed)
    with accelerator.main_process_first():
        tokenizer, dataset, examples = load_data(args)
    padded_fill = expected_padded_fill(dataset, args)  # what the packs are compared with
    model = load_model(args, tokenizer)
    optimizer, scheduler = build_optimizer(args, model, fused=device == "cuda")
    ranks = {"num_workers": args.workers, "sequence_parallel": args.sequence_parallel}
    loader = PackedAccelerateLoader(accelerator, dataset, **ranks)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    live_model = accelerator.unwrap_model(model)
    meter = ThroughputMeter.of(loader, live_model)
    examples = [Example(prompt) for prompt in args.prompt or ()] or examples
    evals = continuation_evals(args, live_model, tokenizer, examples)
    evaluation = AccelerateEval(accelerator, model, *evals, meter=meter, console=True)
    accelerator.print(f"training in {run.path} on {accelerator.num_processes} x {device}")

    def evaluate(last: bool) -> None:
        for report in evaluation.after_step(step, last):
            if is_main and report.metrics:
                run.log(step, report.metrics, EVAL_LOG)

    step, losses, packs, rate = 0, [], [], ""
    if args.resume:
        step = load_checkpoint(accelerator, run.path)
        if is_main:
            run.truncate_logs(step)

    stop = StopRequest()  # on SIGTERM, SIGINT and SIGUSR1, all ranks stop after the step
    with tqdm(total=args.steps, initial=step, dynamic_ncols=True, disable=not is_main) as bar:
        for batch in loader if step < args.steps else ():
            if not run.training_started:  # the loader has passed its checks
                run.start(is_main)
                if args.log_with:
                    accelerator.init_trackers("pretrain")
                if step == 0:
                    evaluate(last=True)  # what later evaluations are compared with
                meter.reset()  # do not count checks and this evaluation as training time
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            packs.append(loader.last_pack)
            meter.add(packs[-1])
            if not accelerator.sync_gradients:
                continue

            step += 1
            values = step_values(accelerator, losses, packs, meter.ranks)
            raise_if_not_finite(values["loss"], f"step {step}")
            values["learning_rate"] = scheduler.get_last_lr()[0]
            if step % 10 == 0 or step == args.steps or not rate:
                values |= {**meter.read(), **meter.totals()}
                rate = f"{values['tokens_per_second']:.0f} tok/s, fill {values['fill']:.1%}"
            accelerator.log(tracker_tags(values), step)
            bar.update()
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {rate}")
            if is_main:
                run.log(step, values)
            losses, packs = [], []
            is_last, stopping = step == args.steps, stop.should_stop()
            if not stopping:
                evaluate(is_last)
            if step % args.save_every == 0 or is_last or stopping:
                save_checkpoint(accelerator, run.path, step, model, tokenizer, keep=args.keep)
            if is_last or stopping:
                break

    check_weights(model, f"step {step}")
    if is_main:
        print("\n".join(write_summary(run, padded_fill, args.budget)))
        run.print_end(f"{run.path}/checkpoint-{step}", finished=step == args.steps)
    stop.release()
    for tracker in accelerator.trackers:  # `end_training` leaves the group, which DDP still uses
        tracker.finish()


def step_values(accelerator, losses: list, packs: list, packs_at_a_time: int) -> dict[str, float]:
    """Return the loss, tokens, samples and packs of a step over all ranks, in one collective."""
    import torch

    tokens, samples = sum(p.num_tokens for p in packs), sum(len(p.lengths) for p in packs)
    mean = torch.stack(losses).mean()
    counts = mean.new_tensor([tokens, samples, len(packs)])
    counts *= packs_at_a_time / accelerator.num_processes  # ranks may share the rows of a pack
    loss, *counts = accelerator.reduce(torch.cat([mean[None], counts]), "sum").tolist()
    values = dict(zip(("tokens", "samples", "packs"), map(round, counts), strict=True))
    return {"loss": loss / accelerator.num_processes, **values}


if __name__ == "__main__":
    sys.exit(run_recipe("pretrain", parse_args, train))
