"""One logical shard of a stream: its own rows, mixture and packer, and a state to replay from.

    rows of source 0 ─▶ encoded ─┐
    rows of source 1 ─▶ encoded ─┴▶ mixture ─▶ Packer ─▶ packs

The state names the samples that wait in the packer by the rows they came from; on resume those
rows are read and encoded again. It is taken before the packer is fed, and a pack says how many
were made since, so a resume feeds the same samples again and passes over what was given out.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..encoding.encode_rows import encoded
from ..encoding.encoder import Encoder
from ..encoding.report import SkippedRows
from ..ordering.mixture import Mixture, Stop, Weight, changing
from ..pack import Pack
from ..planning.overflow import limit
from ..planning.packer import Packer
from ..sample import Sample
from ..sources.source import Row, RowError, RowSource
from ..state.int_codec import from_text, to_text
from .row_reader import ShuffledRows

BATCH = 128
"""Rows that are encoded and packed together."""
STATE_LIMIT = 8 << 20
"""Bytes a shard's state may unfold to; a joined stream's own state may be most of them."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What all shards of a run have in common."""

    sources: list[RowSource]
    weights: list[Weight]
    stop: Stop
    encoder: Encoder
    packer: dict[str, Any]
    shards: int
    seed: int
    window: int
    skip: bool


class ShardReader:
    """The packs of one shard, from its beginning or from a state."""

    def __init__(self, settings: ShardSettings, shard: int, epoch: int, until: int | None):
        self.settings, self.shard = settings, shard
        self.epoch, self.until = epoch, until
        self.packer = Packer(**settings.packer)
        self._longest = limit(settings.packer)
        self.mixture = Mixture(settings.weights, settings.stop, readers=settings.shards)
        self.rows = [
            ShuffledRows(
                source,
                shard,
                settings.shards,
                seed=settings.seed,
                window=settings.window,
                number=number,
                lap=epoch,
            )
            for number, source in enumerate(settings.sources)
        ]
        self.skipped = SkippedRows()
        self.finished = False
        self._ready: list[deque[tuple[int, Sample | RowError]]] = [deque() for _ in self.rows]
        self._origin: dict[int, tuple[int, int]] = {}
        self._snapshot = ""
        self._made: Iterator[Pack] = iter(())
        self._coming: Pack | None = None
        self._count = 0
        self._looked = False
        self._error: Exception | None = None
        self._behind: dict | None = None
        self._kept = 0
        self._before = self.mixture.drawn.copy()
        """Tokens drawn from each source when its lap began."""
        self._given = np.zeros_like(self._before) if changing(settings.weights) else None
        """Tokens of each source in the packs made, over all passes: what weights go on from."""

    def next(self) -> Pack | None:
        """Give the next pack, or None once the shard has ended."""
        if not self._looked:
            self._look_ahead()
        pack = self._coming
        if pack is None:
            if self._error is not None:
                raise self._error
            return None
        self._look_ahead()
        pack.cursor["ended"] = self.ended
        self._behind = pack.cursor
        return pack

    @property
    def ended(self) -> bool:
        """Whether the last pack was given."""
        return self.finished and self._coming is None

    def cursor(self) -> dict:
        """Give the place behind the last pack, for a shard that has ended."""
        if self._behind is None:
            self._snapshot, self._count = self._take_snapshot(), 0
            self._behind = self._place()
        return {**self._behind, "ended": True}

    def _look_ahead(self) -> None:
        """Make the pack after the next one, to know of the next whether it is the last.

        What goes wrong on the way is raised when that pack is asked for, not before.
        """
        self._looked, self._coming = True, next(self._made, None)
        try:
            while self._coming is None and not self.finished:
                self._snapshot, self._count = self._take_snapshot(), 0
                self._made = self._feed()
                self._coming = next(self._made, None)
        except Exception as error:
            self._error = error
        if self._coming is not None:
            self._count += 1
            if self._given is not None:
                np.add.at(self._given, self._coming.sources, self._coming.lengths)
            self._coming.cursor = self._place()

    def _place(self) -> dict:
        """Give the place behind the pack that is coming."""
        place = {"shard": self.shard, "made": self._count, "state": self._snapshot, "ended": False}
        return place if self._given is None else {**place, "given": self._given.tolist()}

    def _feed(self) -> Iterator[Pack]:
        """Draw what the mixture allows, and pack it; at the end, pack what is left."""
        drawn = self._draw()
        if drawn is None:
            self.finished = True
            return self.packer.finish()
        first = self.packer.counts.items
        for place, (source, number, _) in enumerate(drawn, first):
            self._origin[place] = (source, number)
        packs = self.packer.add(sample for _, _, sample in drawn)
        self._origin = {place: self._origin[place] for place in self.packer.held}
        for source, rows in enumerate(self.rows):
            held = [number for origin, number in self._origin.values() if origin == source]
            rows.forget(min([*held, self._position(source)]))
        return packs

    def _draw(self) -> list[tuple[int, int, Sample]] | None:
        """Give the next (source, row, sample) of the mixture; None at the end of the run."""
        while self.epoch != self.until:
            choices, short = self.mixture.draw([self._lengths(s) for s in range(len(self.rows))])
            if len(choices):
                return [self._pop(source) for source in choices.tolist()]
            if short >= 0 and self._refill(short):
                continue
            if short < 0 or self.mixture.ran_out(short):
                self._next_epoch()
            elif self.mixture.stop == "cycle":
                self._check_lap(short)
                self._next_lap(short)
        return None

    def _next_epoch(self) -> None:
        self.epoch += 1
        if self.epoch == self.until:
            return
        if self.until is None:
            self._check_kept()
        self.mixture.restart()
        for source, ready in enumerate(self._ready):
            ready.clear()
            self._next_lap(source)

    def _next_lap(self, source: int) -> None:
        self._before[source] = self.mixture.drawn[source]
        self.rows[source].next_lap()

    def _check_lap(self, source: int) -> None:
        """Refuse to wait for a source that gave nothing in a whole lap: it never will."""
        if self.mixture.drawn[source] == self._before[source]:
            raise ValueError(
                f"source {source} of the mixture has nothing to give in shard {self.shard} of "
                f"{self.settings.shards}: its rows were left out, or there are none; "
                "use fewer shards"
            )

    def _check_kept(self) -> None:
        """Refuse a run without end whose shard has nothing to give: it would turn for ever."""
        kept = self.packer.counts.tokens - self.packer.counts.dropped_tokens
        if kept == self._kept:
            raise ValueError(
                f"shard {self.shard} of {self.settings.shards} has nothing to pack in an epoch: "
                "its rows were left out or dropped, or there are none; use fewer shards"
            )
        self._kept = kept

    def _refill(self, source: int) -> bool:
        """Encode the next rows of a source; False when its lap is over."""
        ready = self._ready[source]
        if ready and isinstance(ready[0][1], RowError):
            raise ready[0][1]
        numbered = self.rows[source].take(BATCH)
        found = self._encoded([row for _, row in numbered], source)
        ready.extend((number, one) for (number, _), one in zip(numbered, found, strict=True))
        return bool(numbered)

    def _encoded(self, rows: list[Row], source: int) -> list[Sample | RowError]:
        return encoded(rows, self.settings.encoder, self._longest, source)

    def _lengths(self, source: int) -> np.ndarray:
        """Give the lengths of the samples that are ready, up to the first row in error."""
        ready, lengths = self._ready[source], []
        while self.settings.skip and ready and isinstance(ready[0][1], RowError):
            self._skip(ready.popleft()[1])
        for _, one in ready:
            if isinstance(one, RowError):
                break
            lengths.append(len(one))
        return np.array(lengths, np.int64)

    def _skip(self, error: Sample | RowError) -> None:
        assert isinstance(error, RowError)
        self.skipped.add(error)

    def _pop(self, source: int) -> tuple[int, int, Sample]:
        number, sample = self._ready[source].popleft()
        assert isinstance(sample, Sample)
        return source, number, sample

    def _position(self, source: int) -> int:
        """Give the number of the first row that is not drawn yet."""
        ready = self._ready[source]
        return ready[0][0] if ready else self.rows[source].given

    def _take_snapshot(self) -> str:
        held = sorted(self._origin)
        origin = np.array([self._origin[place] for place in held], np.int64).reshape(-1, 2)
        readers = []
        for source, rows in enumerate(self.rows):
            numbers, position = origin[origin[:, 0] == source, 1], self._position(source)
            marks = rows.marks_of(numbers, position)
            readers.append({"position": position, "marks": marks, "held": _steps(numbers)})
        state = {
            "epoch": self.epoch,
            "readers": readers,
            "order": to_text(origin[:, 0]) if len(self.rows) > 1 else "",
            "places": _steps(np.array(held, np.int64)),
            "packer": self.packer.state_dict(),
            "mixture": self.mixture.state_dict(),
            "skipped": self.skipped.rows,
            "finished": self.finished,
        }
        return pack_text(state if self._given is None else {**state, "given": self._given.tolist()})

    def behind(self, cursor: dict) -> dict:
        """Give the place before the first pack, if a pass that ended at a cursor went before."""
        # Not what was drawn: where feeds begin, and so what waits in the packer, moves by a resume.
        assert self._given is not None
        if len(cursor.get("given", ())) != len(self._given):
            raise ValueError(f"the state of shard {self.shard} does not say what its packs held")
        self.mixture.drawn[:] = self._given[:] = cursor["given"]
        state = self._take_snapshot()
        return {"made": 0, "state": state, "ended": False, "given": cursor["given"]}

    def load(self, cursor: dict) -> None:
        """Continue behind the pack that carried this cursor."""
        try:
            self._restore(unpack_text(cursor["state"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the state of shard {self.shard} is malformed: {error!r}") from error
        self._behind = {**cursor, "shard": self.shard}
        for _ in range(cursor["made"]):
            if self.next() is None:
                raise ValueError(f"shard {self.shard} ends before the place its state names")

    def load_counts(self, cursor: dict) -> None:
        """Take over only what a cursor says about the past."""
        state = unpack_text(cursor["state"])
        self.skipped.rows = state["skipped"]
        self.mixture.load_state_dict(state["mixture"])
        self.packer.planner.load_state_dict(state["packer"]["planner"])

    def _restore(self, state: dict) -> None:
        self.epoch, self.finished = state["epoch"], state["finished"]
        self.skipped.rows = state["skipped"]
        self.mixture.load_state_dict(state["mixture"])
        if self._given is not None:
            self._given[:] = state["given"]
        self._before[:] = -1  # not in the state: the lap under way is not looked at
        places = np.cumsum(from_text(state["places"]))
        order = from_text(state["order"]) if state["order"] else np.zeros(len(places), np.int64)
        held: dict[int, Sample] = {}
        for source, (rows, reader) in enumerate(zip(self.rows, state["readers"], strict=True)):
            numbers = np.cumsum(from_text(reader["held"])).tolist()
            found = rows.restore(reader["marks"], reader["position"], numbers)
            samples = self._encoded([found[number] for number in numbers], source)
            for place, number, sample in zip(
                places[order == source].tolist(), numbers, samples, strict=True
            ):
                if isinstance(sample, RowError):
                    raise sample
                held[place], self._origin[place] = sample, (source, number)
        self.packer.load_state_dict(state["packer"], dict(sorted(held.items())))


def _steps(numbers: np.ndarray) -> str:
    """Write rising numbers by their distances, which are small."""
    return to_text(np.diff(numbers, prepend=0))


def pack_text(state: dict) -> str:
    """Write a shard's state as short text, if it can be read again."""
    data = json.dumps(state, separators=(",", ":")).encode()
    if len(data) > STATE_LIMIT:
        raise ValueError(
            f"a shard's state has {len(data)} bytes, the limit is {STATE_LIMIT}: a stream is "
            "joined from too many datasets; join fewer, or mix some as [(dataset, weight), ...]"
        )
    return b64encode(zlib.compress(data, 6)).decode()


def unpack_text(text: str) -> dict:
    """Read what `pack_text` wrote, never more than the limit."""
    try:
        unfolding = zlib.decompressobj()
        data = unfolding.decompress(b64decode(text, validate=True), STATE_LIMIT)
        if unfolding.unconsumed_tail:
            raise ValueError(f"it unfolds to more than {STATE_LIMIT} bytes")
        state = json.loads(data)
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise ValueError(f"a shard's state cannot be read: {error}") from None
    if not isinstance(state, dict) or "packer" not in state:
        raise ValueError("a shard's state cannot be read: it is none")
    return state
