"""The same tiny training in three trainers, with evaluations in between or without.

Dropout, gradient checkpointing and loader workers are on. After every step at which an evaluation
may have run, everything it might have disturbed is noted.
"""

from __future__ import annotations

import hashlib
import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import tiny_run
import torch
from nopad.inference import Engine, SamplingParams
from nopad.trainer.evaluation import Example, GenerationEval

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EXAMPLES = [Example([3, 4, 5], "1 2"), Example([7], "3"), Example([1, 2, 3, 4, 5, 6, 7, 8], "4")]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=5),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, max_tokens=5),
}


def model():
    """A model with dropout everywhere but inside attention, whose packed form has none."""
    import nopad.attention  # noqa: F401
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tiny_run.VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="nopad",
    )
    made = GPT2LMHeadModel(config)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def evaluation(live: Any, how: str, end: str, every: int) -> GenerationEval:
    """An evaluation that ends well, raises in the middle of a step, or is interrupted there."""
    engine = Engine(live)

    def generate(*args: Any, **kwargs: Any):
        if end != "ends":
            engine.generate([[1, 2]], PARAMS[how])
            _break(engine, RuntimeError if end == "raises" else KeyboardInterrupt)
        return engine.generate(*args, **kwargs)

    def noisy(text: str, reference: Any) -> float:
        random.random(), np.random.rand(), torch.rand(3)
        return float(text == reference)

    return GenerationEval(generate, EXAMPLES, {"exact": noisy}, PARAMS[how], every=every)


def _break(engine: Engine, kind: type[BaseException]) -> None:
    """Let the second step of the next call fail."""
    runner = engine._executor.runner
    launch, steps = runner.launch, []

    def failing(step: Any):
        steps.append(step)
        if len(steps) == 2:
            raise kind("seeded")
        return launch(step)

    runner.launch = failing


def trace(live: Any, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    """Everything an evaluation might disturb, as it is now."""
    m = live
    slots = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return {
        "weights": digest(m.parameters()),
        "optimizer": digest(slots),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "grads": [p.grad is None or digest([p.grad]) for p in m.parameters()],
        "requires": [p.requires_grad for p in m.parameters()],
        "flags": [x.training for x in m.modules()],
        "attributes": [sorted(x.__dict__) for x in m.modules()],
        "hooks": [
            [len(h) for h in (x._forward_hooks, x._forward_pre_hooks, x._backward_hooks)]
            for x in m.modules()
        ],
        "attention": m.config._attn_implementation,
        "use_cache": m.config.use_cache,
        "checkpointing": m.is_gradient_checkpointing,
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": digest([torch.get_rng_state()]),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "grad_mode": torch.is_grad_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def digest(tensors: Any) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


class Diary:
    """Runs an evaluation, or none, and notes the state after it whatever happens."""

    def __init__(self, how: str | None, end: str, every: int):
        self.how, self.end, self.every = how, end, every
        self.notes: list[dict] = []
        self.reports: list[Any] = []
        self.look: Callable[[], dict] = dict
        self.serve: Callable[[Any], Any] | None = None
        """From the live model to a server whose requests are answered between steps."""

    def attach(self, live: Any, look: Callable[[], dict]) -> GenerationEval:
        """An evaluation of the live model whose every run is followed by a note."""
        self.look = look
        made = evaluation(live, self.how or "greedy", self.end, self.every)
        run = made.run

        def noted(step: int, *args: Any):
            from nopad.trainer.evaluation import Report

            try:
                report = run(step, *args) if self.how else Report(step)
                self.reports.append(report)
                return report
            finally:
                self.notes.append(self.look())

        made.run = noted
        return made


def in_hf(diary: Diary, steps: int, folder: Path) -> dict:
    from nopad.trainer.with_hf import EvalCallback, PackedTrainer, ServeCallback
    from transformers import TrainingArguments

    live = model()
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        gradient_accumulation_steps=2,
        dataloader_num_workers=1,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-2,
        logging_steps=5,
    )
    run = PackedTrainer(live, args, None, tiny_run.dataset(epochs=None))

    def look() -> dict:
        return trace(live, run.optimizer.optimizer, run.lr_scheduler)

    run.add_callback(EvalCallback(run, diary.attach(live, look)))
    if diary.serve:
        run.add_callback(ServeCallback(run, diary.serve(live)))
    run.train()
    return look()


def in_accelerate(diary: Diary, steps: int, folder: Path) -> dict:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from nopad.trainer.loss import attach_loss
    from nopad.trainer.with_accelerate import (
        AccelerateEval,
        AccelerateServe,
        PackedAccelerateLoader,
    )

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    live = model()
    attach_loss(live)
    bare = torch.optim.AdamW(live.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(bare, total_iters=steps)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(epochs=None), num_workers=1)
    wrapped, optimizer, loader = accelerator.prepare(live, bare, loader)

    def look() -> dict:
        return {**trace(live, bare, scheduler), "data": loader.state()}

    evaluations = AccelerateEval(accelerator, wrapped, diary.attach(live, look))
    requests = diary.serve and AccelerateServe(accelerator, wrapped, diary.serve(live))
    wrapped.train()
    done = 0
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            done += 1
            evaluations.after_step(done)
            if requests:
                requests.after_step(done, last=done == steps)
        if done == steps:
            break
    return look()


def in_lightning(diary: Diary, steps: int, folder: Path) -> dict:
    from nopad.trainer.with_lightning import (
        EvalCallback,
        PackedCallback,
        PackedDataModule,
        ServeCallback,
    )

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()

    def look() -> dict:
        return {**trace(module.model, run.optimizers[0]), "data": data.loader.state()}

    data = PackedDataModule(tiny_run.dataset(epochs=None), num_workers=1)
    serving = [ServeCallback(diary.serve(module.model))] if diary.serve else []
    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=2,
        callbacks=[PackedCallback(data), EvalCallback(diary.attach(module.model, look)), *serving],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(module, data)
    return look()


TRAINERS = {"hf": in_hf, "accelerate": in_accelerate, "lightning": in_lightning}
