"""The end of a stream's pass, after which the trainers stop.

Trainers need `max_steps` for data of unknown length, so it is an upper bound there: the epochs or
`max_packs` that a stream was declared with end the training before.
"""

from __future__ import annotations

from typing import Any

from ...packing import PackedDataset
from .preflight import print_banner


def is_stream_end(data: PackedDataset, state: dict[str, Any]) -> bool:
    """Return whether a state is that after the last step of a stream's pass."""
    return data.lengths is None and state["finished"]


def print_stream_end(step: int, max_steps: int) -> None:
    """Print, on the first rank, that the training ends with its data."""
    print_banner([
        f"the stream is over: training ends at step {step:,}, not {max_steps:,}, which the "
        "learning-rate schedule was made for; PackedDataset(epochs=None) reads it again"
    ])  # fmt: skip
