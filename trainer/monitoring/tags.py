"""Names of logged values, the same in all front ends.

train/loss, train/learning_rate    pack/fill, pack/tokens_per_second, ...    eval/...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_TRAINING = ("loss", "learning_rate", "grad_norm", "epoch")
"""Values of the training; all others are about its packs."""


def tracker_tags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name the values of a training step, and the rates of a `ThroughputMeter`, for trackers.

    >>> tracker_tags({"loss": 2.5, "fill": 0.99})
    {'train/loss': 2.5, 'pack/fill': 0.99}
    """
    return {
        f"{'train' if name in OF_TRAINING else 'pack'}/{name}": value
        for name, value in values.items()
    }
