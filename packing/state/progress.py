"""Reader progress of one process: the last completed pack and the cursor of each shard."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..ordering.rank_share import WINDOW, Position, RankShare
from ..pack import Pack

EPOCH = ("epoch", "epoch_start", *WINDOW)


@dataclass(slots=True)
class Progress:
    """Packs done since a position; rounds of one pack per rank start at its index."""

    position: Position
    cursors: dict[int, dict] = field(default_factory=dict)
    num_packs: int = 0
    """Packs of this share done since the position."""
    last: tuple[int, dict] | None = None
    """Index of the last pack done, and its epoch: the fields of a `Position`."""

    def add(self, index: int, cursor: dict) -> None:
        """Count a pack as done."""
        self.num_packs += 1
        if "shard" in cursor:
            for each in (*cursor.get("passed", ()), cursor):
                kept = {k: v for k, v in each.items() if k not in ("shard", "passed")}
                self.cursors[each["shard"]] = kept
            self.last = (index, self._epoch())
        else:
            self.last = (index, cursor)

    def _epoch(self) -> dict:
        fields = self.position.to_json()
        return {name: fields[name] for name in EPOCH if name in fields}

    def check_next(self, index: int, cursor: dict, share: RankShare, shards: int) -> None:
        """Raise if a streamed pack is not this rank's next one: its shard's cursor would be lost.

        The packs of shards that have ended may be missing.
        """
        if "shard" not in cursor:
            return
        first = share.next(self.position.index, self.position.index)
        expected = first if self.last is None else self.last[0] + share.stride
        ended = {shard for shard, known in self.cursors.items() if known["ended"]}
        ended |= {passed["shard"] for passed in cursor.get("passed", ())}
        while expected < index and expected % shards in ended:
            expected += share.stride
        if index != expected:
            raise ValueError(
                f"pack {index} was marked as trained, but pack {expected} comes next: "
                "mark all packs of a stream as trained, in their order"
            )

    def next_position(self, share: RankShare) -> Position:
        """Return the position after the round of the last pack: the same on every rank."""
        if self.last is None:
            return self.position
        index, epoch = self.last
        round_end = share.round_end(index, self.position.index)
        return Position(**epoch, index=round_end, end_epoch=self.position.end_epoch)

    def worker_state(self, worker: int, num_workers: int) -> dict:
        """Return where a DataLoader worker is, for the state that it saves itself."""
        _, epoch = self.last or (0, self._epoch())
        return {"id": worker, "num_workers": num_workers, "num_packs": self.num_packs, **epoch}

    def continue_worker(self, worker: dict, share: RankShare) -> Position:
        """Count the packs of a `worker_state` as done, and return the position after them."""
        self.num_packs = worker["num_packs"]
        index = share.first(self.position.index) + self.num_packs * share.stride
        epoch = {name: worker.get(name, 0) for name in EPOCH}
        return replace(self.position, **epoch, index=index)

    def shard_cursors(self, rank: int = 0, world_size: int = 1) -> dict[str, dict]:
        """Return this rank's cursors with JSON keys; cursors of other ranks' shards are outdated.

        >>> cursor = {"packs_since": 3, "state": "", "ended": False}
        >>> progress = Progress(Position(0, 0, 8, 1), {0: cursor, 1: cursor, 2: cursor})
        >>> list(progress.shard_cursors(rank=0, world_size=2))
        ['0', '2']
        """
        shards = (shard for shard in sorted(self.cursors) if shard % world_size == rank)
        return {str(shard): self.cursors[shard] for shard in shards}


def index_and_cursor(pack: Pack | dict) -> tuple[int, dict]:
    """Return the index and cursor of a pack, or of a batch that carries them."""
    if isinstance(pack, dict):
        return int(pack["index"]), pack["cursor"]
    return pack.index, pack.cursor
