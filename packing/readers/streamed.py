"""Packs streamed from sources of unknown lengths, in logical shards with one reader each.

    pack k comes from shard k mod S          S = 8:   0 1 2 3 4 5 6 7 | 0 1 2 ...
    pack k goes to rank k mod world_size

The sequence of packs depends on S, not on the readers: any ranks x workers that divides S gives the
same packs in the same order. The pack indices of a shard that has ended stay unused. A single
reader skips them; each of several readers, which know nothing of the others, yields empty packs of
weight zero instead. A single rank ends with its last shard, even before `max_packs`. Without
communication, a rank cannot know when the others end, so with several ranks the length of the run
must be given in packs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ..encoding.report import NO_PACKS, SkippedRows, add_counts, build_report
from ..ordering.mixture import has_schedule
from ..ordering.rank_share import Position, RankShare
from ..pack import Pack
from ..planning.planner import Counts
from ..state.fingerprint import Fingerprint
from ..state.run_state import check_packs_left
from .estimate import estimate_packs
from .shard_reader import ShardReader, StreamSettings


class StreamedPacks:
    """The sequence of packs of a sharded stream, readable from any state by any share."""

    def __init__(self, settings: StreamSettings):
        self.settings, self.max_packs = settings, settings.max_packs
        self.sequential_only = any(source.sequential_only for source in settings.sources)
        """Whether the rows of a source can only be read in their order."""
        self._shards: dict[int, ShardReader] = {}

    def read(
        self, position: Position, share: RankShare, base: int, cursors: Mapping[int, dict]
    ) -> Iterator[Pack]:
        """Yield the share's packs from `position` on; cursors are those of its shards."""
        self._check_share(position, share)
        index = share.next(base, position.index)
        shards = self._shards = self._open(position, share, index, cursors)
        # Shards whose end the state does not have yet: each gives a cursor.
        unended = {n for n in shards if not cursors.get(n, {}).get("ended")}
        passed: list[dict] = []
        end = sys.maxsize if self.max_packs is None else share.round_end(self.max_packs - 1, base)
        alone = share.world_size == 1  # several ranks do not know when the others end
        while index < end and not (alone and not unended and _all_ended(shards, share)):
            shard = shards[index % self.settings.shards]
            beyond = self.max_packs is not None and index >= self.max_packs
            pack = None if beyond else shard.next_pack()
            if pack is None:
                if alone and _all_ended(shards, share) and shard.shard not in unended:
                    return
                pack = Pack.of([], self.settings.budget, cursor=shard.last_cursor())
            if share.stride == 1 and not len(pack.samples):
                passed += [pack.cursor] if shard.shard in unended else []
            else:
                if passed:  # the next pack tells the state that these shards have no packs
                    pack.cursor, passed = {**pack.cursor, "passed": passed}, []
                pack.index = index
                yield pack
            unended.discard(shard.shard)
            index += share.stride

    def resume_position(self, state: dict, epochs: int | None) -> Position:
        """Return where a pass of `epochs` epochs and `max_packs` packs continues from a state."""
        if state["epochs"] != epochs:
            raise ValueError(
                f"the state was made with epochs={state['epochs']}, this stream has "
                f"epochs={epochs}: use the same for both"
            )
        position, max_packs = Position(**state["position"]), state["max_packs"]
        if max_packs == self.max_packs:
            return position
        # A position is after a round of the ranks; empty packs complete the last round of a pass.
        index = position.index if max_packs is None else min(position.index, max_packs)
        check_packs_left(index, self.max_packs)
        return replace(position, index=index)

    def _open(self, position: Position, share: RankShare, index: int, cursors: Mapping[int, dict]):
        """Open the shards of a share, each after the last of its packs that was trained on."""
        num_shards, shards = self.settings.shards, {}
        for pack in range(index, index + num_shards, share.stride):
            shard = pack % num_shards
            shards[shard] = ShardReader(self.settings, shard, position.epoch, position.end_epoch)
            if shard in cursors:
                shards[shard].load_cursor(cursors[shard])
            elif shard < position.index:
                raise ValueError(
                    f"the state has no position of shard {shard}: merge the states of all ranks "
                    "with merge_states before loading"
                )
        return shards

    def initial_cursors(self, position: Position, cursors: Mapping[int, dict]) -> dict[int, dict]:
        """Return the cursors at the start of a pass: weights that change with tokens continue.

        cursors: those of the shards in the previous pass, as far as this process knows them.
        """
        if not position.epoch or not has_schedule(self.settings.weights):
            return {}
        if not cursors:
            raise ValueError(
                f"weights that change with the tokens seen cannot start at epoch "
                f"{position.epoch}: this process knows nothing about earlier epochs; pass epochs= "
                "for all epochs in one pass, or call mark_trained() with the packs that DataLoader "
                "workers read"
            )
        reader = partial(
            ShardReader, self.settings, epoch=position.epoch, end_epoch=position.end_epoch
        )
        return {shard: reader(shard).initial_cursor(cursor) for shard, cursor in cursors.items()}

    def fingerprint(self) -> str:
        """Identify the data of all sources."""
        return Fingerprint(*(source.fingerprint() for source in self.settings.sources)).text()

    def count(self, epoch: int = 0) -> int:
        """Raise: the packs of a stream cannot be counted."""
        raise ValueError(
            "a stream's packs cannot be counted before it was read: encode it at the start with "
            "pretokenize=True (an evaluation set needs that), or call estimate()"
        )

    def estimate(self) -> int | None:
        """Estimate the packs of an epoch; None if the size of a source is unknown."""
        return estimate_packs(self.settings)

    def report(self, cursors: Mapping[int, dict]) -> dict:
        """Report the packs up to the cursors; the reasons are those of rows read in this process.

        Rows that were skipped or dropped count with the pack after them or, if their shard has no
        packs, when it has ended.
        """
        without_packs = {
            number: shard.last_cursor()
            for number, shard in self._shards.items()
            if shard.ended and not shard.packer.counts.packs
        }
        cursors = {**without_packs, **cursors}
        skipped = SkippedRows(sum(cursor["skipped"] for cursor in cursors.values()))
        for shard in self._shards.values():
            skipped.reasons += shard.skipped.reasons
        no_tokens = np.zeros(len(self.settings.sources), int)
        tokens = sum((np.array(cursor["packed_tokens"]) for cursor in cursors.values()), no_tokens)
        counts = add_counts(Counts(*cursor["counts"]) for cursor in cursors.values())
        return build_report(counts, tokens.tolist(), skipped, self.settings.budget)

    def _check_share(self, position: Position, share: RankShare) -> None:
        shards = self.settings.shards
        if shards % share.stride:
            *divisors, last = (str(n) for n in range(1, shards + 1) if shards % n == 0)
            choices = f"{', '.join(divisors)} or {last}" if divisors else last
            raise ValueError(
                f"ranks x workers = {share.world_size} x {share.num_workers} = {share.stride} "
                f"readers do not divide {shards} shards: use {choices} readers, or another number "
                "of shards (which gives another sequence of packs)"
            )
        if share.world_size > 1 and position.end_epoch is not None and self.max_packs is None:
            raise ValueError(
                "ranks that stream their own shards cannot know when the others end: pass the "
                "length of the run with max_packs= (over all ranks), or use epochs=None and stop "
                "after a number of steps"
            )


def _all_ended(shards: Mapping[int, ShardReader], share: RankShare) -> bool:
    """Return whether all shards have ended; raise if the data never gave a pack."""
    readers = shards.values()
    ended = all(shard.ended for shard in readers)
    if ended and share.stride == 1 and not any(shard.packer.counts.packs for shard in readers):
        raise ValueError(NO_PACKS)
    return ended
