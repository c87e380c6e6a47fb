"""One rank of a harness run; prints its metrics as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_tasks
import torch
import torch.distributed as dist
from nopad.inference.harness import Harness
from small_checkpoint import random_model, small_tokenizer


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    own = folder / f"{dist.get_world_size()}-{dist.get_rank()}"
    own.mkdir()
    names = lm_tasks.write_tasks(own, 20)
    tokenizer = small_tokenizer()
    found = Harness(random_model(tokenizer), tokenizer, names, limit=5, include_path=str(own))()
    print(json.dumps({name: round(value, 5) for name, value in found.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
