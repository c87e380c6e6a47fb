"""The random numbers of a checkpoint, so that a resumed run drops what the other would have.

Every rank draws its own. Of each there is a list: its host's state, and its GPU's if it has one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ranks import gather_objects, rank, world


def gathered_random(device: torch.device) -> list[list[Tensor]]:
    """Return where torch's random numbers stand on every rank; call it on every rank."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    return gather_objects(own)


def load_random(states: list[list[Tensor]], device: torch.device) -> None:
    """Draw on from there, unless the ranks are others: whose numbers should they take."""
    if len(states) != world():
        return
    host, *on_device = (state.cpu() for state in states[rank()])
    torch.set_rng_state(host)
    if device.type == "cuda" and on_device:
        torch.cuda.set_rng_state(on_device[0], device)
