"""The order of a run in pure integers: permutations, epochs, mixtures, shares of the ranks."""

from .mixture import Mixture
from .permutation import permute, shuffle_key
from .rank_shard import Position, RankShard

__all__ = [
    "Mixture",
    "Position",
    "RankShard",
    "permute",
    "shuffle_key",
]
