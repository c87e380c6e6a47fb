"""Detect the end of a stream's pass, and report trainings that end with it, or before it.

Trainers need `max_steps` for data of unknown length, where it is an upper bound: the `epochs` or
`max_packs` of the stream may end the training earlier.
"""

from __future__ import annotations

from typing import Any

from ...packing import PackedDataset
from ..banner import print_banner


def is_stream_end(data: PackedDataset, state: dict[str, Any]) -> bool:
    """Return whether a state is that after the last step of a stream's pass."""
    return data.lengths is None and state["finished"]


def print_stream_end(step: int, max_steps: int) -> None:
    """Print, on the first rank, that the training ends with its data."""
    print_banner([
        f"the stream is over: training ends at step {step:,}, not {max_steps:,}, which the "
        "learning-rate schedule was made for; PackedDataset(epochs=None) reads it again"
    ])  # fmt: skip


def print_unread_stream(data: PackedDataset, state: dict[str, Any], max_steps: int) -> None:
    """Print, on the first rank, that `max_steps` ended the training before the pass of a stream.

    Nothing is printed for data that repeats without end, or whose packs were counted before.
    """
    is_endless = data.epochs is None and data.max_packs is None
    if data.lengths is not None or is_endless or state["finished"]:
        return
    packs = f" after {data.report()['packs']:,} packs" if data.ranks()[1] == 1 else ""
    print_banner([
        f"the stream was not read to its end: max_steps={max_steps} ended the training{packs}; "
        "to read all of it, pass a larger max_steps"
    ])  # fmt: skip
