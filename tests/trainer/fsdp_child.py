"""One rank of packed training under FSDP2, in a loop of one's own; prints one line of JSON."""

from __future__ import annotations

import json

import tiny_run
import torch
import torch.distributed as dist
from nopad.trainer.loader import PackedLoader
from nopad.trainer.loss import attach_loss
from torch.distributed.fsdp import fully_shard


def main(accumulation: int = 2) -> None:
    dist.init_process_group("gloo")
    found = {}
    whole = tiny_run.packs(tiny_run.dataset(rank=0, world=1), accumulation * dist.get_world_size())
    gold = tiny_run.gold_gradient(tiny_run.model(), whole)
    for resharded in (False, True):
        model = tiny_run.model()
        fused = attach_loss(model).fused
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=resharded)
        fully_shard(model, reshard_after_forward=resharded)
        loader = iter(PackedLoader(tiny_run.dataset(), accumulation=accumulation))
        for _ in range(accumulation):
            (model(**next(loader)).loss / accumulation).backward()
        gradient = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found[str(resharded)] = [fused, tiny_run.distance(gradient, gold)]
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
