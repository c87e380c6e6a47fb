"""One rank of each front end in layouts with shared rows, shared layers and sharded weights.

    front_end_layouts_child.py FOLDER CASE...

Every case trains `STEPS` steps of `GLOBAL_BATCH` packs in fp64, then evaluates by generation and on
a validation set. Prints how far weights and validation loss are from one rank's, and the answers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import ModelParallelStrategy
from nopad.inference import DataParallelEngine, Engine, SamplingParams
from nopad.runtime import destroy_group
from nopad.trainer import with_lightning
from nopad.trainer.evaluation import Example, GenerationEval
from nopad.trainer.with_accelerate import AccelerateEval, PackedAccelerateLoader
from nopad.trainer.with_hf import EvalCallback, PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

STEPS, GLOBAL_BATCH, RATE = 2, 4, 0.5
EXAMPLES = [Example([1, 2, 3]), Example([4]), Example([5, 6, 7, 8]), Example([9, 10])]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def validation_set():
    return tiny_run.dataset(13, seed=9)


def one_rank(folder: Path) -> tuple[dict[str, torch.Tensor], list[list[int]], float]:
    """Weights, answers and validation loss of samples trained one by one."""
    model = tiny_run.model().double()
    packs = tiny_run.packs(tiny_run.dataset(rank=0, world_size=1), STEPS * GLOBAL_BATCH)
    for step in range(STEPS):
        own = packs[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        gradient = tiny_run.gold_gradient(model, own)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= RATE * gradient[name]
    answers = [c.token_ids for c in Engine(model).generate([e.prompt for e in EXAMPLES], GREEDY)]
    losses = []
    for pack in tiny_run.dataset(13, seed=9, rank=0, world_size=1):
        batch = tiny_run.collate(pack)
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0, :-1]
        targets = batch["labels"][0, 1:]
        losses.append(
            torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets >= 0]
        )
    return dict(model.named_parameters()), answers, float(torch.cat(losses).mean())


def load(kind: str, folder: Path) -> Any:
    """A model as users load it: with tensor parallelism, with FSDP beside it, or whole."""
    shards = {"tp": (2, 1), "tp_fsdp": (2, dist.get_world_size() // 2)}
    how = {}
    if kind in shards:
        tensor, fsdp = shards[kind]
        how["distributed_config"] = DistributedConfig(tp_size=tensor, fsdp_size=fsdp)
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, attn_implementation="nopad", **how
    )


def accelerator_settings(kind: str) -> dict[str, Any]:
    world = dist.get_world_size()
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )}  # fmt: skip
    return {
        "ddp": {},
        "sp": {},
        "sp_size": {"parallelism_config": ParallelismConfig(sp_size=2)},
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
        "tp_fsdp": {},
        "fsdp": plugin,
        "cp": {
            **plugin,
            "parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=world // 2),
        },
        "hsdp": {
            **plugin,
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        },
    }[kind]


def pretend_gpus(kind: str) -> None:
    """Start Accelerate's states over; it would accept these layouts on GPUs only."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    if kind not in ("ddp", "sp"):
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP would want a GPU
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def data_size(kind: str) -> int:
    return dist.get_world_size() // (2 if kind in ("sp", "sp_size", "cp", "tp", "tp_fsdp") else 1)


def evaluation(model: Any, answers: list) -> GenerationEval:
    engine = DataParallelEngine(Engine(model))

    def generate(*args: Any, **kwargs: Any) -> list:
        completions = engine.generate(*args, **kwargs)
        answers[:] = [c.token_ids for c in completions]
        return completions

    length = {"length": lambda text, _: len(text)}
    return GenerationEval(generate, EXAMPLES, length, params=GREEDY, every=STEPS, on_error="raise")


def accelerate(kind: str, folder: Path) -> tuple[Any, list, float | None]:
    pretend_gpus(kind)
    accumulation = GLOBAL_BATCH // data_size(kind)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation, **accelerator_settings(kind)
    )
    model = load(kind, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    shared = {"sequence_parallel": 2} if kind == "sp" else {}
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), **shared)
    assert loader.packs_at_a_time == data_size(kind)
    if kind == "cp":
        with pytest.raises(ValueError, match="maybe_context_parallel would attend"):
            accelerator.maybe_context_parallel()
    answers: list = []
    evaluations = AccelerateEval(
        accelerator, model, evaluation(accelerator.unwrap_model(model), answers)
    )
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            evaluations.after_step(step)
        if step == STEPS:
            break
    return accelerator.unwrap_model(model), answers, None


def hf(kind: str, folder: Path) -> tuple[Any, list, float | None]:
    pretend_gpus(kind)
    settings = accelerator_settings(kind)
    fsdp = {"fsdp": "full_shard", "fsdp_config": {
        "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }} if "fsdp_plugin" in settings else {}  # fmt: skip
    args = TrainingArguments(
        str(folder / "hf"), max_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=GLOBAL_BATCH // data_size(kind), max_grad_norm=0,
        optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", save_strategy="no",
        parallelism_config=settings.get("parallelism_config") if kind != "tp" else None, **fsdp,
    )  # fmt: skip
    assert args.device.type == "cpu"  # from now on, Accelerate's state is there
    pretend_gpus(kind)
    shared = {"sequence_parallel": 2} if kind == "sp" else {}
    model = load(kind, folder)
    trainer = PackedTrainer(
        model, args, None, tiny_run.dataset(), eval_dataset=validation_set(), **shared
    )
    answers: list = []
    trainer.add_callback(EvalCallback(trainer, evaluation(model, answers)))
    trainer.train()
    return trainer.model, answers, trainer.evaluate()["eval_loss"]


class Module(pl.LightningModule):
    def __init__(self, kind: str, folder: Path):
        super().__init__()
        self.kind, self.folder = kind, folder
        if kind != "tp":
            self.model = load(kind, folder)

    def configure_model(self) -> None:
        if self.kind == "tp" and not hasattr(self, "model"):
            self.model = load("tp", self.folder)
        if self.kind == "fsdp":
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.model(**batch).loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def lightning(kind: str, folder: Path) -> tuple[Any, list, float | None]:
    strategy: Any = "ddp"
    if kind in ("tp", "fsdp"):
        tensor = 2 if kind == "tp" else 1
        strategy = ModelParallelStrategy(dist.get_world_size() // tensor, tensor, False)
    shared = 2 if kind == "sp" else 1
    packs = PackedDataModule(tiny_run.dataset(), validation_set(), sequence_parallel=shared)
    module, answers = Module(kind, folder), []

    class Late(pl.Callback):
        """The engine needs the model, which some modules make when the training starts."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.callbacks.append(
                with_lightning.EvalCallback(evaluation(pl_module.model, answers))
            )

    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=STEPS,
        accumulate_grad_batches=GLOBAL_BATCH // data_size(kind), logger=False,
        callbacks=[PackedCallback(packs), Late()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=GLOBAL_BATCH // data_size(kind) * STEPS,
    )  # fmt: skip
    trainer.fit(module, packs)
    return module.model, answers, float(trainer.callback_metrics["val"])


FRONT_ENDS = {"accelerate": accelerate, "hf": hf, "lightning": lightning}


def main(folder: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    gold, wanted, wanted_loss = one_rank(Path(folder))
    found, environment = {}, dict(os.environ)
    for case in cases:
        os.environ.clear()
        os.environ.update(environment)  # libraries leave their settings there
        front_end, kind = case.split()
        pretend_gpus("ddp")
        model, answers, loss = FRONT_ENDS[front_end](kind, Path(folder))
        sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
        assert sharded == (kind in ("tp", "tp_fsdp", "fsdp", "hsdp", "cp")), case
        weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
        distance = max(float((weights[n] - gold[n]).norm() / gold[n].norm()) for n in gold)
        found[case] = {
            "distance": distance,
            "answers": answers == wanted,
            "loss": None if loss is None else abs(loss / wanted_loss - 1),
        }
    print(json.dumps(found))
    del model  # before the group: see `destroy_group`
    destroy_group()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
