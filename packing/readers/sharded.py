"""Packs of streams whose lengths are not known: logical shards, each read by one worker.

    pack k comes from shard k mod S          S = 8:   0 1 2 3 4 5 6 7 | 0 1 2 ...
    pack k goes to rank k mod world

So the sequence of packs depends on S, not on who reads: any ranks x workers that divides S gives
the same packs in the same order. A shard that ends before the others gives empty packs of weight
zero. One rank ends with its last shard. Several cannot know when the others end without talking:
there the length of the run must be said, in packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from math import ceil

import numpy as np

from ..encoding.report import NOTHING, SkippedRows, add_counts, report
from ..ordering.mixture import changing
from ..ordering.permutation import Position, Share
from ..pack import Pack
from ..sample import Sample
from .shard import ShardReader, ShardSettings


class StreamedPacks:
    """The sequence of packs of a sharded stream, readable from any state by any share."""

    def __init__(self, settings: ShardSettings, packs: int | None = None):
        self.settings, self.packs = settings, packs
        self._streams: dict[int, ShardReader] = {}

    def read(
        self, position: Position, share: Share, base: int, cursors: Mapping[int, dict]
    ) -> Iterator[Pack]:
        """Give the share's packs from `position` on; cursors are those of the shards so far."""
        self._check(position, share)
        following = share.next(base, position.index)
        streams = self._streams = self._open(position, share, following, cursors)
        end = None if self.packs is None else share.round_end(self.packs - 1, base)
        while not self._all_ended(share) if end is None else following < end:
            stream = streams[following % self.settings.shards]
            pack = stream.next() if self.packs is None or following < self.packs else None
            if pack is None:
                if self._all_ended(share) and end is None:
                    return
                pack = Pack.of([], self.settings.packer["budget"], cursor=stream.cursor())
            pack.index = following
            yield pack
            following += share.stride

    def _open(self, position: Position, share: Share, following: int, cursors: Mapping[int, dict]):
        """Open the shards of a share, each behind the last of its packs that was stepped."""
        shards, streams = self.settings.shards, {}
        for pack in range(following, following + shards, share.stride):
            shard = pack % shards
            streams[shard] = ShardReader(self.settings, shard, position.epoch, position.until)
            if shard in cursors:
                streams[shard].load(cursors[shard])
            elif shard < position.index:
                raise ValueError(
                    f"the state does not say where shard {shard} stands: join the states of all "
                    "ranks with merge_states before loading"
                )
        return streams

    def carried(self, position: Position, cursors: Mapping[int, dict]) -> dict[int, dict]:
        """Give the cursors to begin a pass with: where weights follow the tokens seen, they go on.

        cursors: of the shards in the pass before, as far as this process knows it.
        """
        if not position.epoch or not changing(self.settings.weights):
            return {}
        if not cursors:
            raise ValueError(
                f"weights that follow the tokens seen cannot begin with epoch {position.epoch}: of "
                "those before it this process knows nothing; say epochs= to have all in one pass, "
                "or call stepped() with the packs that a DataLoader's workers read"
            )
        shard = partial(ShardReader, self.settings, epoch=position.epoch, until=position.until)
        return {number: shard(number).behind(cursor) for number, cursor in cursors.items()}

    def _all_ended(self, share: Share) -> bool:
        """Whether nothing comes any more; data that never gave a pack is refused."""
        streams = self._streams.values()
        ended = all(stream.ended for stream in streams)
        if ended and share.stride == 1 and not any(s.packer.counts.packs for s in streams):
            raise ValueError(NOTHING)
        return ended

    def estimate(self) -> int | None:
        """Guess the packs of an epoch from the first rows of each source and its size."""
        tokens = 0.0
        for source in self.settings.sources:
            if source.size is None:  # and what can be read only once must not be read here
                return None
            rows = [row.value for row in islice(source.read(0, 1), 256)]
            samples = self.settings.encoder.encode(rows)
            found = sum(len(sample) for sample in samples if isinstance(sample, Sample))
            if not rows:
                return None
            tokens += found * source.size / max(1, sum(len(str(row)) for row in rows))
        return ceil(tokens / self.settings.packer["budget"])

    def report(self, cursors: Mapping[int, dict]) -> dict:
        """Account for what was read here, or else for what the cursors say."""
        streams = list(self._streams.values())
        for shard, cursor in cursors.items() if not streams else ():
            streams.append(ShardReader(self.settings, shard, 0, None))
            streams[-1].load_counts(cursor)
        skipped = SkippedRows()
        for stream in streams:
            skipped.rows += stream.skipped.rows
            skipped.reasons += stream.skipped.reasons
        drawn = sum((s.mixture.drawn for s in streams), np.zeros(len(self.settings.sources), int))
        counts = add_counts(stream.packer.counts for stream in streams)
        return report(counts, drawn.tolist(), skipped, self.settings.packer["budget"])

    def _check(self, position: Position, share: Share) -> None:
        shards = self.settings.shards
        if shards % share.stride:
            fits = [n for n in range(1, shards + 1) if shards % n == 0]
            near = sorted(fits, key=lambda n: abs(n - share.stride))[:2]
            raise ValueError(
                f"{share.world} ranks x {share.workers} workers = {share.stride} readers do not "
                f"divide {shards} shards: use {' or '.join(map(str, sorted(near)))} readers, or "
                f"another number of shards (which makes another sequence of packs)"
            )
        if share.world > 1 and position.until is not None and self.packs is None:
            raise ValueError(
                "ranks that stream their own shards cannot know when the others end: say how long "
                "the run is with packs= (over all ranks), or use epochs=None and stop by steps"
            )
