"""One rank of a gloo group: run a case of `CASES` and print what it returned or raised as JSON."""

from __future__ import annotations

import json
import sys
import time

import torch
from nopad.runtime import (
    all_ranks_or_none,
    barrier,
    destroy_group,
    gather_objects,
    gather_rng_states,
    init_group,
    load_rng_states,
    rank,
    sum_over_ranks,
    world_size,
)


def raise_on_rank_one(error: BaseException):
    def work() -> int:
        if rank() == 1:
            raise error
        time.sleep(0.2)  # the other rank fails first
        return rank()

    return all_ranks_or_none(work)


def raise_on_both() -> list:
    def work() -> None:
        raise (ValueError("of rank 0") if rank() == 0 else KeyboardInterrupt)

    return all_ranks_or_none(work)


def exit_and_error() -> list:
    def work() -> None:
        raise (ValueError("of rank 0") if rank() == 0 else SystemExit("enough"))

    return all_ranks_or_none(work)


def facts() -> list:
    barrier()
    return [
        rank(),
        world_size(),
        gather_objects({"rank": rank()}),
        sum_over_ranks(rank() + 1.5).item(),
    ]


def random_states() -> bool:
    cpu = torch.device("cpu")
    torch.manual_seed(rank())
    states = gather_rng_states(cpu)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    load_rng_states(states, cpu)
    return bool(len(states) == 2 and torch.equal(torch.rand(3), drawn))


CASES = {
    "results": lambda: all_ranks_or_none(lambda: rank() * 10),
    "error": lambda: raise_on_rank_one(ValueError("no such file")),
    "interrupt": lambda: raise_on_rank_one(KeyboardInterrupt()),
    "exit": lambda: raise_on_rank_one(SystemExit("stopping early")),
    "interrupt and error": raise_on_both,
    "exit and error": exit_and_error,
    "facts": facts,
    "random states": random_states,
}


def main(case: str) -> None:
    init_group()
    try:
        outcome = {"result": CASES[case]()}
    except BaseException as error:
        outcome = {"type": type(error).__name__, "message": str(error)}
    after = gather_objects(rank())  # the group is still usable
    destroy_group()
    print(json.dumps(outcome | {"after": after}))


if __name__ == "__main__":
    main(sys.argv[1])
