"""`RankShare`: the packs that each rank and worker reads; `Position`: the place in a pass.

Pack k belongs to rank k mod world_size. The packs of a rank go to its workers in turn, in the
order in which a DataLoader collects them. A round is `world_size` consecutive packs: one per rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

WINDOW = ("window", "window_start")


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a pass: packs below `index` are done."""

    epoch: int = 0
    epoch_start: int = 0
    """Index of the first pack of `epoch`."""
    index: int = 0
    end_epoch: int | None = None
    """The pass ends before this epoch; None: it never ends."""
    window: int = 0
    """The part of a very large epoch that is planned on its own."""
    window_start: int = 0
    """Index of the first pack of that part; 0 in the first part."""

    @property
    def planned_start(self) -> int:
        """Index of the pack from which packs are planned to reach this position."""
        return self.window_start if self.window else self.epoch_start

    def to_json(self) -> dict:
        """Return the fields for a state; those of the first window are omitted."""
        fields = asdict(self)
        return fields if self.window else {k: v for k, v in fields.items() if k not in WINDOW}


@dataclass(frozen=True, slots=True)
class RankShare:
    """The packs that one worker of one rank produces.

    >>> share = RankShare(rank=1, world_size=2, worker=0, num_workers=2)
    >>> share.first(0), share.stride
    (1, 4)
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1

    def __post_init__(self):
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not one of {self.world_size} ranks, counted from 0: pass "
                "rank and world_size of torch.distributed, or neither"
            )
        if not 0 <= self.worker < self.num_workers:
            raise ValueError(f"worker {self.worker} is not one of {self.num_workers} workers")

    @property
    def stride(self) -> int:
        """Distance between two consecutive packs of this share."""
        return self.world_size * self.num_workers

    def first(self, base: int) -> int:
        """Return the first pack of this share when the run starts at pack `base`."""
        offset = (self.rank - base) % self.world_size
        return base + offset + self.worker * self.world_size

    def next(self, base: int, index: int) -> int:
        """Return the first pack of this share that is not before `index`."""
        first = self.first(base)
        return first + max(0, -(-(index - first) // self.stride)) * self.stride

    def round_start(self, index: int, base: int) -> int:
        """Return the first pack of the round that contains `index`; rounds start at `base`."""
        return index - (index - base) % self.world_size

    def round_end(self, index: int, base: int) -> int:
        """Return the pack after the last one of that round."""
        return self.round_start(index, base) + self.world_size
