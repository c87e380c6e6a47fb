"""`ShardReader`: the packs of one logical shard of a stream, resumable from a cursor.

    rows of source 0 ─▶ encode ─┐
    rows of source 1 ─▶ encode ─┴▶ mixture ─▶ Packer ─▶ packs

The packer is emptied at the end of an epoch, so all documents of an epoch are packed before any of
the next.

The state names the samples that are pending in the packer by the rows they came from; a resume
reads and encodes those rows again. It is taken before the packer is fed, and a pack's cursor
counts the packs since then, so a resume feeds the same samples again and skips these packs.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..encoding.encoder import Encoder, encode_rows
from ..encoding.report import SkippedRows
from ..ordering.mixture import INTERVAL_END, Mixture, has_schedule
from ..pack import Pack
from ..planning.overflow import kept_lengths, max_sample_length
from ..planning.packer import Packer
from ..sample import Sample
from ..settings import PackSettings
from ..sources.source import Row, RowError, RowSource
from ..state.int_codec import ints_from_text, ints_to_text
from ..state.run_state import is_non_negative_int
from .shuffled_rows import ShuffledRows

FEED_ROWS = 128
"""Rows that are encoded and packed together."""


@dataclass(kw_only=True)
class StreamSettings(PackSettings):
    """The settings that all shards of a stream share."""

    sources: list[RowSource]
    encoder: Encoder
    shards: int  # pyright: ignore[reportIncompatibleVariableOverride]
    """Chosen by the user, or by the sources."""


class ShardReader:
    """The packs of one shard, from its beginning or from a cursor."""

    def __init__(self, settings: StreamSettings, shard: int, epoch: int, end_epoch: int | None):
        self.settings, self.shard = settings, shard
        self.epoch, self.end_epoch = epoch, end_epoch
        self.packer = Packer(**settings.packer)
        self._max_length = max_sample_length(settings.packer)
        self.mixture = Mixture(
            settings.weights,
            settings.stopping_strategy,
            num_readers=settings.shards,
            budget=settings.budget,
        )
        self.rows = [
            ShuffledRows(
                source,
                shard,
                settings.shards,
                seed=settings.seed,
                shuffle_block=settings.shuffle_block,
                source_index=number,
                lap=epoch,
            )
            for number, source in enumerate(settings.sources)
        ]
        self.skipped = SkippedRows()
        self.finished = epoch == end_epoch
        """Whether all rows were fed to the packer."""
        self._epoch_ended = False
        """Whether the packer was emptied, and the rows of the next epoch come next."""
        self._encoded: list[deque[tuple[int, Sample | RowError]]] = [deque() for _ in self.rows]
        self._row_of_sample: dict[int, tuple[int, int]] = {}
        """(source, row number) of each sample pending in the packer."""
        self._snapshot = ""
        self._packs: Iterator[Pack] = iter(())
        """Packs made since the snapshot."""
        self._packs_since = 0
        self._next: Pack | None = None
        self._looked_ahead = False
        self._error: Exception | None = None
        self._last_cursor: dict | None = None
        self._kept_tokens = 0
        self._drawn_at_lap_start = self.mixture.tokens_drawn.copy()
        self._packed_tokens = np.zeros_like(self._drawn_at_lap_start)
        """Tokens of each source in the packs made; of weights that change, over all passes."""

    def next_pack(self) -> Pack | None:
        """Return the next pack, or None once the shard has ended."""
        if not self._looked_ahead:
            self._look_ahead()
        pack = self._next
        if pack is None:
            if self._error is not None:
                raise self._error
            return None
        self._look_ahead()
        if self.ended:  # rows may have been skipped or dropped after the last pack
            pack.cursor |= {**self._counters(), "ended": True}
        self._last_cursor = pack.cursor
        return pack

    @property
    def ended(self) -> bool:
        """Whether the last pack was returned."""
        return self.finished and self._next is None

    def last_cursor(self) -> dict:
        """Return the cursor after the last pack of a shard that has ended."""
        if self._last_cursor is None:
            self._snapshot, self._packs_since = self._take_snapshot(), 0
            self._last_cursor = self._make_cursor()
        return {**self._last_cursor, "ended": True}

    def _look_ahead(self) -> None:
        """Make the pack after the next one, to know whether the next one is the last.

        An error while making it is raised when that pack is requested, not before.
        """
        self._looked_ahead, self._next = True, next(self._packs, None)
        try:
            while self._next is None and not self.finished:
                self._snapshot, self._packs_since = self._take_snapshot(), 0
                self._packs = self._feed()
                self._next = next(self._packs, None)
        except Exception as error:
            self._error = error
        if self._next is not None:
            self._packs_since += 1
            np.add.at(self._packed_tokens, self._next.sources, self.packer.last_lengths)
            self._next.cursor = self._make_cursor()

    def _make_cursor(self) -> dict:
        """Return the cursor after the pack in `_next`."""
        return {
            "shard": self.shard,
            "packs_since": self._packs_since,
            "state": self._snapshot,
            "ended": False,
            **self._counters(),
        }

    def _counters(self) -> dict:
        """Return what was packed, dropped and skipped up to the pack in `_next`."""
        if self.ended:
            self.packer.count_dropped()
        return {
            "counts": self.packer.packed_counts.as_list(),
            "packed_tokens": self._packed_tokens.tolist(),
            "skipped": self.skipped.rows,
        }

    def _feed(self) -> Iterator[Pack]:
        """Pack as many samples as the mixture allows; at the end of an epoch, pack the rest."""
        if self._epoch_ended:
            self._next_epoch()
        drawn, needed = self._draw()
        if drawn is None:
            self._epoch_ended, self.finished = True, self.epoch + 1 == self.end_epoch
            # An interval of a schedule ends with the epoch; its packs keep the shares even too.
            even = self.packer.flush() if has_schedule(self.settings.weights) else ()
            packs = chain(even, self.packer.finish())
        else:
            first = self.packer.counts.items
            for number, (source, row, _) in enumerate(drawn, first):
                self._row_of_sample[number] = (source, row)
            packs = self.packer.add(sample for _, _, sample in drawn)
            if needed == INTERVAL_END:
                packs = chain(packs, self.packer.flush())
        self._row_of_sample = {n: self._row_of_sample[n] for n in self.packer.pending}
        for source, rows in enumerate(self.rows):
            pending = [row for origin, row in self._row_of_sample.values() if origin == source]
            rows.drop_before(min([*pending, self._next_row(source)]))
        return packs

    def _draw(self) -> tuple[list[tuple[int, int, Sample]] | None, int]:
        """Return the next (source, row, sample), and what the mixture needs to continue.

        At the end of an epoch, None instead of a list.
        """
        while True:
            choices, needed = self.mixture.draw([self._lengths(s) for s in range(len(self.rows))])
            if len(choices):
                return [self._pop(source) for source in choices.tolist()], needed
            if needed >= 0 and self._refill(needed):
                continue
            if needed < 0 or self.mixture.mark_exhausted(needed):
                return None, needed
            if self.mixture.stopping_strategy == "all_exhausted":
                self._check_lap(needed)
                self._next_lap(needed)

    def _next_epoch(self) -> None:
        self.epoch, self._epoch_ended = self.epoch + 1, False
        if self.end_epoch is None:
            self._check_epoch()
        self.mixture.restart()
        for source, queue in enumerate(self._encoded):
            queue.clear()
            self._next_lap(source)

    def _next_lap(self, source: int) -> None:
        self._drawn_at_lap_start[source] = self.mixture.tokens_drawn[source]
        self.rows[source].next_lap()

    def _check_lap(self, source: int) -> None:
        """Raise if a source had no sample in a complete read: waiting for it would never end."""
        if self.mixture.tokens_drawn[source] == self._drawn_at_lap_start[source]:
            raise ValueError(
                f"source {source} of the mixture has no samples in shard {self.shard} of "
                f'{self.settings.shards}: its rows were skipped or dropped (overflow="drop"), or '
                "there are none; use fewer shards, or remove the source"
            )

    def _check_epoch(self) -> None:
        """Raise if a shard of an endless run packed nothing in an epoch: it would loop forever."""
        kept = self.packer.counts.tokens - self.packer.counts.dropped_tokens
        if kept == self._kept_tokens:
            raise ValueError(
                f"shard {self.shard} of {self.settings.shards} has nothing to pack in an epoch: "
                "its rows were skipped or dropped, or there are none; use fewer shards"
            )
        self._kept_tokens = kept

    def _refill(self, source: int) -> bool:
        """Encode the next rows of a source; False when it has been read to its end."""
        queue = self._encoded[source]
        if queue and isinstance(queue[0][1], RowError):
            raise queue[0][1]
        numbered = self.rows[source].take(FEED_ROWS)
        results = self._encode([row for _, row in numbered], source)
        queue.extend(
            (number, result) for (number, _), result in zip(numbered, results, strict=True)
        )
        return bool(numbered)

    def _encode(self, rows: list[Row], source: int) -> list[Sample | RowError]:
        return encode_rows(rows, self.settings.encoder, self._max_length, source)

    def _lengths(self, source: int) -> np.ndarray:
        """Return the lengths of the encoded samples, up to the first row in error."""
        queue, lengths = self._encoded[source], []
        while self.settings.skips_errors and queue and isinstance(queue[0][1], RowError):
            error = queue.popleft()[1]
            assert isinstance(error, RowError)
            self.skipped.add(error)
        for _, result in queue:
            if isinstance(result, RowError):
                break
            lengths.append(len(result))
        return kept_lengths(np.array(lengths, np.int64), self.settings.packer)

    def _pop(self, source: int) -> tuple[int, int, Sample]:
        number, sample = self._encoded[source].popleft()
        assert isinstance(sample, Sample)
        return source, number, sample

    def _next_row(self, source: int) -> int:
        """Return the number of the first row that was not drawn yet."""
        queue = self._encoded[source]
        return queue[0][0] if queue else self.rows[source].next_row

    def _take_snapshot(self) -> str:
        samples = sorted(self._row_of_sample)
        origins = np.array([self._row_of_sample[n] for n in samples], np.int64).reshape(-1, 2)
        readers = []
        for source, rows in enumerate(self.rows):
            numbers, position = origins[origins[:, 0] == source, 1], self._next_row(source)
            marks, pending = rows.marks_for(numbers, position), increasing_to_text(numbers)
            readers.append({"position": position, "marks": marks, "pending": pending})
        state = {
            "epoch": self.epoch,
            "readers": readers,
            "sources": ints_to_text(origins[:, 0]) if len(self.rows) > 1 else "",
            "samples": increasing_to_text(np.array(samples, np.int64)),
            "packer": self.packer.state_dict(),
            "mixture": self.mixture.state_dict(),
            "skipped": self.skipped.rows,
            "finished": self.finished,
            "packed_tokens": self._packed_tokens.tolist(),
        }
        return compress_state(state)

    def initial_cursor(self, cursor: dict) -> dict:
        """Return the cursor before the first pack of the pass after one that ended at a cursor."""
        # Packed tokens, not drawn ones: a resume moves where feeds begin, and so what is pending.
        packed_tokens = cursor["packed_tokens"]
        if len(packed_tokens) != len(self._packed_tokens):
            raise ValueError(f"the state of shard {self.shard} lacks the tokens of its packs")
        self.mixture.tokens_drawn[:] = self._packed_tokens[:] = packed_tokens
        self._snapshot = self._take_snapshot()
        return {name: value for name, value in self._make_cursor().items() if name != "shard"}

    def load_cursor(self, cursor: dict) -> None:
        """Continue after the pack that carried this cursor."""
        try:
            self._restore(decompress_state(cursor["state"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the state of shard {self.shard} is malformed: {error!r}") from error
        own = self._counters()
        if any(len(cursor[name]) != len(own[name]) for name in ("counts", "packed_tokens")):
            raise ValueError(f"the state of shard {self.shard} has other counters than this nopad")
        self._last_cursor = {**cursor, "shard": self.shard}
        # The packs since a snapshot were made from the samples of one feed.
        last = self.packer.counts.items + 2 * FEED_ROWS * len(self.rows)
        for _ in range(cursor["packs_since"]):
            if self.packer.counts.items > last or self.next_pack() is None:
                raise ValueError(f"shard {self.shard} ends before the position of its state")

    def _restore(self, state: dict) -> None:
        self.epoch, self.finished = state["epoch"], state["finished"]
        last = self.epoch if self.end_epoch is None else self.end_epoch - (not self.finished)
        if not is_non_negative_int(self.epoch) or self.epoch > last:
            raise ValueError(f"shard {self.shard} is in epoch {self.epoch} of {self.end_epoch}")
        self.skipped.rows = state["skipped"]
        self.mixture.load_state_dict(state["mixture"])
        self._packed_tokens[:] = state["packed_tokens"]
        self._drawn_at_lap_start[:] = -1  # not in the state: the current lap is not checked
        samples, sources = increasing_from_text(state["samples"]), state["sources"]
        origins = ints_from_text(sources) if sources else np.zeros(len(samples), np.int64)
        pending: dict[int, Sample] = {}
        for source, (rows, reader) in enumerate(zip(self.rows, state["readers"], strict=True)):
            numbers = increasing_from_text(reader["pending"]).tolist()
            restored = rows.restore(reader["marks"], reader["position"], numbers)
            encoded = self._encode([restored[number] for number in numbers], source)
            sample_numbers = samples[origins == source].tolist()
            for sample_number, row, sample in zip(sample_numbers, numbers, encoded, strict=True):
                if isinstance(sample, RowError):
                    raise sample
                pending[sample_number] = sample
                self._row_of_sample[sample_number] = (source, row)
        self.packer.load_state_dict(state["packer"], dict(sorted(pending.items())))


STATE_LIMIT = 8 << 20
"""Decompressed bytes of a shard's state; a joined stream's own state may be most of them."""


def compress_state(state: dict) -> str:
    """Encode a shard's state, or raise if it is too large to be decoded again."""
    data = json.dumps(state, separators=(",", ":")).encode()
    if len(data) > STATE_LIMIT:
        raise ValueError(
            f"a shard's state has {len(data)} bytes, the limit is {STATE_LIMIT}: the stream joins "
            "too many datasets; join fewer, or mix some as [(dataset, weight), ...]"
        )
    return b64encode(zlib.compress(data, 6)).decode()


def decompress_state(text: str) -> dict:
    """Decode the text of `compress_state`, never to more than the limit."""
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(b64decode(text, validate=True), STATE_LIMIT)
        if decompressor.unconsumed_tail:
            raise ValueError(f"it decompresses to more than {STATE_LIMIT} bytes")
        state = json.loads(data)
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise ValueError(f"a shard's state cannot be read: {error}") from None
    if not isinstance(state, dict) or "packer" not in state:
        raise ValueError("not a shard state")
    return state


def increasing_to_text(numbers: np.ndarray) -> str:
    """Encode increasing numbers by their differences, which are small."""
    return ints_to_text(np.diff(numbers, prepend=0))


def increasing_from_text(text: str) -> np.ndarray:
    """Decode the text of `increasing_to_text`."""
    return np.cumsum(ints_from_text(text))
