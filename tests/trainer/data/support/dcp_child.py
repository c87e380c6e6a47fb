"""One rank that saves, or loads and goes on, through `torch.distributed.checkpoint`.

Prints one line of JSON: the packs that it trained on before the save, and after the load.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import tiny_run
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nopad.packing import PackedDataset
from nopad.trainer import DataState, PackedLoader


def data(kind: str, folder: Path) -> PackedDataset:
    """A planned set, or a stream of 4 shards, in two epochs' worth of packs."""
    if kind == "planned":
        return tiny_run.dataset(epochs=2)
    rows = folder / "rows.jsonl"
    settings = {"shards": 4, "shuffle": 8, "pool": 8, "epochs": None, "max_packs": 32}
    return PackedDataset(rows, budget=tiny_run.BUDGET, pretokenize=False, **settings)


def train(loader: PackedLoader, weight: torch.Tensor, steps: int | None) -> list[int]:
    """Record the packs of some steps, or of all that are left."""
    packs = []
    for batch in loader:
        packs.append(loader.last_pack.index)
        weight += float(batch["labels"].sum())
        if len(packs) == steps:
            break
    return packs


def main(action: str, kind: str, folder: str) -> None:
    dist.init_process_group("gloo")
    loader, weight = PackedLoader(data(kind, Path(folder))), torch.zeros(())
    state = {"weight": weight, "data": DataState(loader)}
    place = Path(folder) / kind
    found = []
    if action == "load":
        dcp.load(state, checkpoint_id=place)
        found = train(loader, weight, None)
    elif action == "save":
        found = train(loader, weight, 3)
        dcp.save(state, checkpoint_id=place)
    else:
        found = train(loader, weight, 3)
        own = dist.new_group(backend="gloo")  # the training goes on in the other group
        saving = dcp.async_save(state, checkpoint_id=place, process_group=own)
        train(loader, weight, 2)  # is not saved: the state was taken when the save began
        saving.result()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
