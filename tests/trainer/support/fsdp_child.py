"""One rank of packed training under FSDP2, in a loop of one's own; prints one line of JSON."""

from __future__ import annotations

import json
from itertools import product

import tiny_run
import torch
import torch.distributed as dist
from nopad.trainer.data import PackedLoader
from nopad.trainer.loss import attach_loss
from torch.distributed.fsdp import fully_shard


def main(accumulation: int = 2) -> None:
    dist.init_process_group("gloo")
    found = {}
    whole = tiny_run.packs(
        tiny_run.dataset(rank=0, world_size=1), accumulation * dist.get_world_size()
    )
    gold = tiny_run.gold_gradient(tiny_run.model(), whole)
    for resharded, unit in product((False, True), ("", "head", "norm and head")):
        model = tiny_run.model()
        loss = attach_loss(model)
        head, norm = model.lm_head, model.model.norm
        own = {"": [], "head": [head], "norm and head": [[norm, head]]}[unit]
        for part in [*model.model.layers, *own, model]:
            fully_shard(part, reshard_after_forward=resharded)
        loader = iter(PackedLoader(tiny_run.dataset(), accumulation_steps=accumulation))
        for _ in range(accumulation):
            (model(**next(loader)).loss / accumulation).backward()
        gradient = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        with torch.no_grad():
            model(**next(loader))
        let_go = hasattr(head.weight, "full_tensor") or not resharded
        case = f"{resharded=}, {unit=}"
        found[case] = [loss.fused, let_go, tiny_run.distance(gradient, gold)]
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
