"""How far a process has come: the last pack it counts as done, and where its shards stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ordering.permutation import Position, Share
from ..pack import Pack


@dataclass(slots=True)
class Progress:
    """Packs done since a position; rounds of one pack per rank are counted from its index."""

    position: Position
    cursors: dict[int, dict] = field(default_factory=dict)
    taken: int = 0
    """Packs of this share done since the position."""
    last: tuple[int, int, int] | None = None
    """(index, epoch, start) of the last pack done."""

    def add(self, index: int, cursor: dict) -> None:
        """Count a pack as done."""
        self.taken += 1
        if "shard" in cursor:
            place = {name: value for name, value in cursor.items() if name != "shard"}
            self.cursors[cursor["shard"]] = place
            self.last = (index, self.position.epoch, self.position.start)
        else:
            self.last = (index, cursor["epoch"], cursor["start"])

    def expect(self, index: int, cursor: dict, share: Share, shards: int) -> None:
        """Refuse a pack that is not this rank's next one, where its shard's place would be lost.

        Workers whose shards have all ended send nothing any more: those packs may be missing.
        """
        if "shard" not in cursor:
            return
        first = share.next(self.position.index, self.position.index)
        expected = first if self.last is None else self.last[0] + share.stride
        while expected < index and self.cursors.get(expected % shards, {}).get("ended"):
            expected += share.stride
        if index != expected:
            raise ValueError(
                f"pack {index} was stepped where pack {expected} comes next: "
                "a stream's packs must all be stepped, in their order"
            )

    def reached(self, share: Share) -> Position:
        """Give the position behind the round of the last pack: the same on every rank."""
        if self.last is None:
            return self.position
        index, epoch, start = self.last
        following = share.round_end(index, self.position.index)
        return Position(epoch, start, following, self.position.until)

    def shards(self, rank: int = 0, world: int = 1) -> dict[str, dict]:
        """Give the cursors as JSON wants them, but those of other ranks' shards: they have moved.

        >>> at = {"made": 3, "state": "", "ended": False}
        >>> list(Progress(Position(0, 0, 8, 1), {0: at, 1: at, 2: at}).shards(rank=0, world=2))
        ['0', '2']
        """
        own = (shard for shard in sorted(self.cursors) if shard % world == rank)
        return {str(shard): self.cursors[shard] for shard in own}


def done(pack: Pack | dict) -> tuple[int, dict]:
    """Read the index and cursor of a pack, or of a batch that carries them."""
    if isinstance(pack, dict):
        return int(pack["index"]), pack["cursor"]
    return pack.index, pack.cursor
