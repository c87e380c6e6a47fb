"""Documents whose tokens lie in flat arrays: lengths are known at once, reading is a copy.

    flat    [ a a a a b b c c c ]      in memory, or memory-mapped from a file of any size
    begins  [ 0       4   6     ]
    lengths [ 4       2   3     ]

Whole packs are laid out by one compiled loop, so no Python runs per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .compiled import compiled
from .fingerprint import Fingerprint
from .sample import IGNORE, Sample


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """Documents in one flat array; a store has one shelf per file, or per source of a mixture."""

    name: str
    flat: np.ndarray
    """Token ids of any integer type."""
    begins: np.ndarray
    """int64 [n]: where each document begins in `flat`."""
    lengths: np.ndarray
    """[n]: tokens of each document."""
    labels: np.ndarray | None = None
    """As long as `flat`; left out, every token of a document but its first counts."""
    source: int = 0

    @classmethod
    def of(cls, samples: Sequence[Sample], name: str = "samples", source: int = 0) -> Shelf:
        """Put samples that are in memory on one shelf."""
        lengths = np.array([len(sample) for sample in samples], np.int64)
        empty = np.empty(0, np.int64)
        flat = np.concatenate([empty, *(sample.tokens for sample in samples)])
        labels = np.concatenate([empty, *(sample.labels for sample in samples)])
        begins = np.cumsum(lengths) - lengths
        plain = flat.copy()
        plain[begins] = IGNORE
        kept = None if np.array_equal(plain, labels) else labels
        return cls(name, flat, begins, lengths, kept, source)

    def fingerprint(self) -> str:
        """Identify the documents by their lengths and content."""
        mark = Fingerprint(len(self.lengths), self.labels is not None)
        return mark.array(self.lengths).array(self.flat).array(self.labels).text()


class TokenStore:
    """Documents of one or several shelves, numbered through.

    >>> store = TokenStore([Shelf.of([Sample(np.array([5, 6, 7])), Sample(np.array([8, 9]))])])
    >>> rows = store.lay(np.array([1, 0]), np.array([0, 1]), np.array([2, 2]), np.array([0, 2]))
    >>> rows.tokens.tolist(), rows.labels.tolist(), rows.bounds.tolist()
    ([8, 9, 6, 7], [-100, 9, -100, 7], [0, 2, 4])
    """

    def __init__(self, shelves: Sequence[Shelf]):
        self.shelves = list(shelves)
        self.firsts = np.cumsum([0, *(len(shelf.lengths) for shelf in shelves)])
        self.lengths = (
            shelves[0].lengths
            if len(shelves) == 1
            else np.concatenate([np.zeros(0, np.int64), *(s.lengths for s in shelves)])
        )

        first_of = {shelf.source: i for i, shelf in reversed(list(enumerate(self.shelves)))}
        self._source_firsts = np.array([self.firsts[first_of[s.source]] for s in self.shelves])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def check(self) -> None:
        """Refuse empty documents, naming the first."""
        for shelf in self.shelves:
            if len(shelf.lengths) and shelf.lengths.min() < 1:
                row = int(np.argmin(shelf.lengths))
                raise ValueError(f"{shelf.name}, document {row} is empty: leave it out")

    def check_ids(self, rows: Rows, documents: np.ndarray, vocab_size: int | None) -> None:
        """Refuse ids below 0 or beyond the vocabulary, naming the document."""
        if _within(rows.tokens, np.iinfo(np.int64).max if vocab_size is None else vocab_size):
            return
        bad = rows.tokens < 0
        if vocab_size is not None:
            bad |= rows.tokens >= vocab_size
        place = int(np.argmax(bad))
        segment = int(np.searchsorted(rows.places, place, side="right")) - 1
        name = self.shelves[int(self.shelf_of(documents[segment]))].name
        number = int(self.numbers(documents[segment : segment + 1])[0])
        raise ValueError(
            f"{name}, document {number} holds the id {rows.tokens[place]}: ids go from 0 to "
            f"{'the vocabulary' if vocab_size is None else vocab_size - 1}"
        )

    def source_bounds(self, sources: int) -> list[int]:
        """Give the first document of each source, and the end."""
        counts = np.zeros(sources, np.int64)
        for shelf in self.shelves:
            counts[shelf.source] += len(shelf.lengths)
        return [0, *np.cumsum(counts).tolist()]

    def fingerprint(self) -> str:
        """Identify all documents."""
        return Fingerprint(*(shelf.fingerprint() for shelf in self.shelves)).text()

    def lay(self, documents, starts, lengths, offsets, align: int = 1, pad: int = 0) -> Rows:
        """Lay the segments of several packs end to end: documents[s][starts[s]:][:lengths[s]]."""
        rows = Rows.empty(lengths, offsets, align)
        if len(self.shelves) == 1:
            _fill(self.shelves[0], documents, starts, lengths, rows, pad)
            return rows
        shelf_of = self.shelf_of(documents)
        for number in np.unique(shelf_of):
            some = np.flatnonzero(shelf_of == number)
            shelf, own = self.shelves[number], documents[some] - self.firsts[number]
            _fill(shelf, own, starts[some], lengths[some], rows, pad, some)
        return rows

    def shelf_of(self, documents: np.ndarray) -> np.ndarray:
        """Give the shelf each document stands on."""
        return np.searchsorted(self.firsts, documents, side="right") - 1

    def sources(self, documents: np.ndarray) -> np.ndarray:
        """int16: the source of the mixture each document comes from."""
        if len(self.shelves) == 1:
            return np.full(len(documents), self.shelves[0].source, np.int16)
        by_shelf = np.array([shelf.source for shelf in self.shelves], np.int16)
        return by_shelf[self.shelf_of(documents)]

    def numbers(self, documents: np.ndarray) -> np.ndarray:
        """int64: the number of each document in its own source."""
        if len(self.shelves) == 1:
            return documents
        return documents - self._source_firsts[self.shelf_of(documents)]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Several packs end to end, to be cut into views."""

    tokens: np.ndarray
    labels: np.ndarray
    bounds: np.ndarray
    """int32: cu_seqlens of all packs one behind the other, N+1 entries each."""
    ends: np.ndarray
    """int64 [P+1]: where each pack's tokens end."""
    places: np.ndarray
    """int64 [M]: where each segment begins in `tokens`."""
    widths: np.ndarray
    """int64 [M]: places each segment takes; more than its tokens where it is aligned."""

    @classmethod
    def empty(cls, lengths: np.ndarray, offsets: np.ndarray, align: int) -> Rows:
        """Make room for these segments, and set their boundaries."""
        widths = lengths if align == 1 else -(-lengths // align) * align
        total = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(widths, out=total[1:])
        bounds = np.empty(len(lengths) + len(offsets) - 1, np.int32)
        _bound(total, offsets, bounds)
        size = int(total[-1])
        tokens, labels = np.empty(size, np.int64), np.empty(size, np.int64)
        return cls(tokens, labels, bounds, total[offsets], total[:-1], widths)


def _fill(shelf, documents, starts, lengths, rows: Rows, pad: int, some=None) -> None:
    places = rows.places if some is None else rows.places[some]
    widths = rows.widths if some is None else rows.widths[some]
    froms = shelf.begins[documents] + starts
    labels = shelf.flat if shelf.labels is None else shelf.labels
    _copy(shelf.flat, labels, froms, lengths, places, widths, pad, rows.tokens, rows.labels)


@compiled
def _within(tokens, limit):
    """Whether 0 <= token < limit for all; one sign bit collects what is not, without branches."""
    signs = 0
    for i in range(len(tokens)):
        signs |= tokens[i] | (limit - 1 - tokens[i])
    return signs >= 0


@compiled
def _bound(total, offsets, bounds):
    at = 0
    for p in range(len(offsets) - 1):
        for s in range(offsets[p], offsets[p + 1] + 1):
            bounds[at] = total[s] - total[offsets[p]]
            at += 1


@compiled
def _copy(flat, flat_labels, froms, lengths, places, widths, pad, tokens, labels):
    for s in range(len(froms)):
        begin, place, n = froms[s], places[s], lengths[s]
        ids, marks = flat[begin : begin + n], flat_labels[begin : begin + n]
        to, label = tokens[place : place + widths[s]], labels[place : place + widths[s]]
        for i in range(n):
            to[i] = ids[i]
        for i in range(n):
            label[i] = marks[i]
        for i in range(n, len(to)):
            to[i] = pad
            label[i] = -100
        label[0] = -100
