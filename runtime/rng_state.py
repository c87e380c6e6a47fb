"""Random states: kept unchanged around a block, or saved for all ranks in a checkpoint.

A checkpoint holds one list per rank: the host's torch state, then the GPU's if there is one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from .collectives import gather_objects
from .ranks import rank, world_size


@contextmanager
def preserve_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random states on exit.

    device: the GPU whose state to restore; by default the current one, once CUDA is in use.
    """
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    python, legacy, states = random.getstate(), np.random.get_state(), rng_states(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        _set_rng_states(states, device)


def rng_states(device: torch.device | None = None) -> list[Tensor]:
    """Return torch's random state of the host and, if `device` is a GPU, of the device."""
    states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def gather_rng_states(device: torch.device, own: list[Tensor] | None = None) -> list[list[Tensor]]:
    """Return the random states of all ranks, for a checkpoint; call it on every rank.

    own: the states of this rank; default: the current ones.
    """
    return gather_objects(own or rng_states(device))


def load_rng_states(states: list[list[Tensor]], device: torch.device) -> None:
    """Restore the random states of a checkpoint; skipped when the world size changed."""
    if len(states) == world_size():
        _set_rng_states([state.cpu() for state in states[rank()]], device)


def _set_rng_states(states: list[Tensor], device: torch.device | None) -> None:
    host, *on_device = states
    torch.set_rng_state(host)
    if device is not None and device.type == "cuda" and on_device:
        torch.cuda.set_rng_state(on_device[0], device)
