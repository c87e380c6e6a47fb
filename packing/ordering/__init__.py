"""The order of a run in pure integers: permutations, epochs, mixtures, shares of the ranks."""

from .mixture import Mixture
from .permutation import permute, shuffle_key
from .share import Position, Share

__all__ = [
    "Mixture",
    "Position",
    "Share",
    "permute",
    "shuffle_key",
]
