"""`Layout`: the role of each rank in a run, in integers.

    world of 8, sequence 2, tensor 2:   rank = 4 * data + 2 * sequence + tensor

    data-parallel rank   0 0 0 0 | 1 1 1 1      a pack for each
    sequence               0 0 1 1 | 0 0 1 1    each half of the row's tokens
    tensor                 0 1 0 1 | 0 1 0 1    each half of the layers' weights

Ranks with the same data-parallel rank are one replica: they get the same packs. FSDP and HSDP are
data parallelism here: their ranks share the weights, and each trains on different packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that form groups: `size` ranks, `stride` apart.

    >>> Axis(stride=2, size=2).group(rank=5)
    [5, 7]
    """

    stride: int = 1
    size: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Axis:
        """Return the axis of one group of ranks."""
        if len(ranks) == 1:
            return cls()
        strides = {after - before for before, after in pairwise(ranks)}
        if len(strides) > 1 or min(strides) < 1:
            raise ValueError(f"the ranks {list(ranks)} of a group must be evenly spaced")
        return cls(strides.pop(), len(ranks))

    def index(self, rank: int) -> int:
        """Return the index of a rank in its group."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> list[int]:
        """Return the ranks of the group of a rank."""
        first = rank - self.index(rank) * self.stride
        return list(range(first, first + self.stride * self.size, self.stride))

    def number(self, rank: int) -> int:
        """Return the number of the group of a rank.

        >>> [Axis(2, 2).number(rank) for rank in range(8)]
        [0, 1, 0, 1, 2, 3, 2, 3]
        """
        return rank // (self.stride * self.size) * self.stride + rank % self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """The role of this process in the run."""

    rank: int = 0
    world_size: int = 1
    tensor: Axis = Axis()
    """Ranks that share every layer: tensor parallelism."""
    sequence: Axis = Axis()
    """Ranks that share the tokens of a row: sequence or context parallelism."""

    def __post_init__(self):
        for kind, axis in (("tensor", self.tensor), ("sequence", self.sequence)):
            if self.world_size % (axis.stride * axis.size):
                raise ValueError(
                    f"{kind} parallelism over {axis.size} ranks does not divide the run's "
                    f"{self.world_size} ranks: start a multiple of {axis.stride * axis.size}"
                )

    @property
    def replica_size(self) -> int:
        """The number of ranks that train together on one pack."""
        return self.tensor.size * self.sequence.size

    @property
    def data_size(self) -> int:
        """The number of replicas: packs that are trained at a time."""
        return self.world_size // self.replica_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's replica.

        >>> ranks = [Layout(rank, 8, tensor=Axis(1, 2), sequence=Axis(2, 2)) for rank in range(8)]
        >>> [layout.data_rank for layout in ranks]
        [0, 0, 0, 0, 1, 1, 1, 1]
        """
        firsts = [self.tensor.number(rank) for rank in self.sequence.group(self.rank)]
        return Axis.of(firsts).number(firsts[0])

    def describe(self) -> str:
        """Name the kinds of parallelism and their sizes.

        >>> Layout(0, 8, sequence=Axis(1, 4)).describe()
        '2 data-parallel ranks, each a group of 4 by sequence parallelism'
        """
        axes = {"tensor": self.tensor.size, "sequence": self.sequence.size}
        kinds = [f"{size} by {kind} parallelism" for kind, size in axes.items() if size > 1]
        groups = f", each a group of {' times '.join(kinds)}" if kinds else ""
        return f"{self.data_size} data-parallel rank{'s' * (self.data_size > 1)}{groups}"
