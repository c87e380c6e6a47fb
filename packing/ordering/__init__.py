"""The order of a run in pure integers: permutations, epochs, mixtures, shares of the ranks."""

from .mixture import Mixture
from .permutation import permute, shuffle_key
from .rank_share import Position, RankShare

__all__ = [
    "Mixture",
    "Position",
    "RankShare",
    "permute",
    "shuffle_key",
]
