"""One rank of the Accelerate tests; prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from nopad.runtime import destroy_group
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader


def prepare(accumulation: int, workers: int = 0, attached: bool = True, **data):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = tiny_run.model()
    if attached:
        attach_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(**data), num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer, loader


def train(run, steps: int) -> dict:
    """Step at most `steps` times; the first gradient, the loss of every step, the packs seen."""
    accelerator, model, optimizer, loader = run
    gradient, losses, packs, done = None, [], [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            packs.append(loader.last_pack.index)
            losses.append(float(loss))
            if accelerator.sync_gradients:
                done += 1
                if gradient is None:
                    bare = accelerator.unwrap_model(model)
                    gradient = {n: p.grad.clone() for n, p in bare.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        if done == steps:
            break
    size = accelerator.gradient_accumulation_steps
    windows = [losses[i : i + size] for i in range(0, len(losses), size)]
    means = [
        float(accelerator.reduce(torch.tensor(sum(w) / size), reduction="mean")) for w in windows
    ]
    return {"gradient": gradient, "losses": means, "packs": packs, "steps": done}


def gradients(world: int) -> dict:
    """Distance from the gold gradient, by accumulation, workers and kind of loss."""
    found = {}
    for accumulation in (1, 4):
        whole = tiny_run.dataset(rank=0, world_size=1)
        gold = tiny_run.gold_gradient(tiny_run.model(), tiny_run.packs(whole, accumulation * world))
        cases = [(0, True)] if accumulation == 1 else [(0, True), (2, True), (0, False)]
        for workers, attached in cases:
            seen = train(prepare(accumulation, workers, attached), 1)
            name = f"{accumulation} {workers} {attached}"
            found[name] = tiny_run.distance(seen["gradient"], gold)
    return found


def resumed(folder: Path) -> dict:
    """Six steps at once, and three, a checkpoint, and three in a fresh run."""
    whole = prepare(2, epochs=None)
    seen = train(whole, 6)
    first = prepare(2, epochs=None)
    before = train(first, 3)
    first[0].save_state(str(folder))
    second = prepare(2, workers=1, epochs=None)
    second[0].load_state(str(folder))
    after = train(second, 3)
    return {
        "whole": [seen["packs"], seen["losses"], tiny_run.digest(whole[1])],
        "parts": [
            before["packs"] + after["packs"],
            before["losses"] + after["losses"],
            tiny_run.digest(second[1]),
        ],
    }


def moved(folder: Path) -> list:
    """Go on with the checkpoint of two ranks alone, with as many packs a step as they had."""
    run = prepare(4, epochs=None)
    run[0].load_state(str(folder))
    seen = train(run, 3)
    return [seen["packs"], seen["losses"]]


def main(folder: Path, world: int, other: Path | None) -> None:
    curve = train(prepare(8 // world, epochs=None), 4)
    ends = train(prepare(2, count=9), 1000)
    sliced = train(prepare(2, count=40), 1000)
    print(
        json.dumps(
            {
                "gradients": gradients(world),
                "resumed": resumed(folder),
                "curve": curve["losses"],
                "ends": [ends["steps"], sliced["steps"]],
                "packs": sliced["packs"],
                "moved": moved(other) if other else None,
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
    destroy_group()
