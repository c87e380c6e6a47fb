"""The order of rows: permutations, epochs, shares of ranks and workers, mixtures. Pure integers."""

from .mixture import Mixture
from .permutation import Position, Share, key, shuffled

__all__ = [
    "Mixture",
    "Position",
    "Share",
    "key",
    "shuffled",
]
