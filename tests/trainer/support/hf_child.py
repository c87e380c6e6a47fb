"""One rank of the HF Trainer tests; prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.runtime import destroy_group
from nopad.trainer.with_hf import PackedTrainer
from transformers import TrainerCallback, TrainingArguments

# Transformers 5.17 loads the optimizer of several CPU ranks to `cpu:0`, which torch does not know.
torch.serialization.register_package(
    5, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None
)


class Watch(TrainerCallback):
    """Keeps the first gradient, and the losses."""

    def __init__(self):
        self.gradient, self.losses = None, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if self.gradient is None:
            named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
            bare = {n.replace("module.", "").replace("_orig_mod.", ""): p for n, p in named}
            self.gradient = {name: p.grad.clone() for name, p in bare.items()}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])


class DroppedCount(PackedTrainer):
    """Does not hand on the number of items, as subclasses written for older versions do."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return super().compute_loss(model, inputs, return_outputs)


class OwnForward(PackedTrainer):
    """Calls the model itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def sum_over_items(outputs, labels, num_items_in_batch):
    """A `compute_loss_func`."""
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[0, :-1], labels[0, 1:], reduction="sum"
    )
    return losses / num_items_in_batch


def trainer(
    folder: Path,
    data: PackedDataset,
    accumulation: int,
    more=None,
    collator=None,
    kind=PackedTrainer,
    **settings,
):
    """A trainer and its watch; `more` is the trainer's, the settings are its arguments'."""
    args = TrainingArguments(
        str(folder),
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        **{"save_strategy": "no", "learning_rate": 1e-2, "logging_steps": 1, **settings},
    )
    watch = Watch()
    run = kind(tiny_run.model(), args, collator, data, callbacks=[watch], **(more or {}))
    return run, watch


def gradients(folder: Path, world: int) -> dict:
    found = {}
    for accumulation in (1, 4):
        whole = tiny_run.dataset(rank=0, world_size=1)
        gold = tiny_run.gold_gradient(tiny_run.model(), tiny_run.packs(whole, accumulation * world))
        if accumulation == 1:  # compiled on one rank only: tracing takes as long as all the rest
            compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
            cases = {"compiled": compiled} if world == 1 else {}
        else:
            cases = {"plain": {}, "workers": {"dataloader_num_workers": 2}}
            cases["checkpointing"] = {"gradient_checkpointing": True}
            cases["count dropped"] = {"kind": DroppedCount}
            cases["forward of its own"] = {"kind": OwnForward}
            cases["compute_loss_func"] = {"more": {"compute_loss_func": sum_over_items}}
        for name, settings in cases.items():
            run, watch = trainer(folder, tiny_run.dataset(), accumulation, max_steps=1, **settings)
            run.train()
            found[f"{accumulation} {name}"] = tiny_run.distance(watch.gradient, gold)
    return found | means_over_ranks(folder, world)


def means_over_ranks(folder: Path, world: int) -> dict:
    """The same, for both means."""
    found = {}
    for mean in ("token", "sample"):
        packs = tiny_run.packs(tiny_run.dataset(rank=0, world_size=1), 2 * world)
        gold = tiny_run.gold_gradient(tiny_run.model(), packs, mean)
        collator = PackedCollator(mean=mean)
        run, watch = trainer(folder, tiny_run.dataset(), 2, collator=collator, max_steps=1)
        run.train()
        found[f"{mean} mean"] = tiny_run.distance(watch.gradient, gold)
    return found


def resumed(folder: Path) -> dict:
    endless = {"epochs": None}
    whole, seen = trainer(folder / "whole", tiny_run.dataset(**endless), 2, max_steps=6)
    whole.train()
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    first, before = trainer(folder / "parts", tiny_run.dataset(**endless), 2, **saving)
    first.add_callback(StopAfterThree())
    first.train()
    second, after = trainer(folder / "parts", tiny_run.dataset(**endless), 2, max_steps=6)
    second.train(resume_from_checkpoint=True)
    return {
        "whole": [seen.losses, tiny_run.digest(whole.model)],
        "parts": [before.losses + after.losses, tiny_run.digest(second.model)],
    }


class StopAfterThree(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3


def evaluated(folder: Path) -> dict[str, list[float]]:
    """The eval_loss of each way to compute it, beside the token mean over the whole set."""
    ways = {
        "stock": {},
        "count dropped": {"kind": DroppedCount},
        "forward of its own": {"kind": OwnForward},
        "compute_loss_func": {"more": {"compute_loss_func": sum_over_items}},
    }
    return {name: evaluated_by(folder, **way) for name, way in ways.items()}


def evaluated_by(folder: Path, **way) -> list[float]:
    run, _ = trainer(folder, tiny_run.dataset(), 1, max_steps=1, **way)
    losses, count = 0.0, 0
    for pack in tiny_run.dataset(23, rank=0, world_size=1):
        batch = tiny_run.collate(pack)
        batch = {k: v.to(run.args.device) if torch.is_tensor(v) else v for k, v in batch.items()}
        with torch.no_grad():
            losses += float(run.model(**batch, num_items_in_batch=1).loss)
        count += pack.num_label_tokens
    got = run.evaluate(tiny_run.dataset(23))["eval_loss"]
    return [got, losses / count]


def main(folder: Path, world: int) -> None:
    ended, watch = trainer(folder, tiny_run.dataset(count=19), 2, num_train_epochs=2)
    ended.train()
    curve, seen = trainer(folder, tiny_run.dataset(epochs=None), 8 // world, max_steps=4)
    curve.train()
    print(
        json.dumps(
            {
                "gradients": gradients(folder, world),
                "resumed": resumed(folder),
                "curve": seen.losses,
                "totals": [ended.state.log_history[n]["pack/tokens_seen"] for n in (-2, -1)],
                "ends": [ended.state.global_step, len(watch.losses)],
                "evaluated": evaluated(folder),
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
    destroy_group()
