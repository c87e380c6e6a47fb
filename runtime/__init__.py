"""What training and generation share about the process and the model: ranks, random states, unwrapping."""

from .ranks import (
    gather_objects,
    join_group,
    leave_group,
    rank,
    sum_over_ranks,
    wait_for_all,
    world,
)
from .rng_state import gathered_random, load_random

__all__ = [
    "gather_objects",
    "gathered_random",
    "join_group",
    "leave_group",
    "load_random",
    "rank",
    "sum_over_ranks",
    "wait_for_all",
    "world",
]
