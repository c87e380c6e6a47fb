"""Documents whose tokens lie in flat arrays: lengths are known at once, reading is a copy.

    flat    [ a a a a b b c c c ]      in memory, or memory-mapped from a file of any size
    begins  [ 0       4   6     ]
    lengths [ 4       2   3     ]

Whole packs are laid out by one compiled loop, so no Python runs per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..jit import jit
from ..planning.plan import Plan
from ..sample import IGNORE_INDEX, Sample
from ..state.fingerprint import Fingerprint

NO_LIMIT = np.iinfo(np.int64).max
"""Of ids, where no vocabulary is known."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
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
    def of(cls, samples: Sequence[Sample], name: str = "samples", source: int = 0) -> TokenArray:
        """Put samples that are in memory on one shelf."""
        lengths = np.array([len(sample) for sample in samples], np.int64)
        empty = np.empty(0, np.int64)
        flat = np.concatenate([empty, *(sample.tokens for sample in samples)])
        labels = np.concatenate([empty, *(sample.labels for sample in samples)])
        begins = np.cumsum(lengths) - lengths
        plain = flat.copy()
        plain[begins] = IGNORE_INDEX
        kept = None if np.array_equal(plain, labels) else labels
        return cls(name, flat, begins, lengths, kept, source)

    def sound(self, limit: int | None = None) -> np.ndarray:
        """bool [n]: which documents have tokens, with all ids from 0 to below a limit."""
        most = NO_LIMIT if limit is None else limit
        ends = self.begins + self.lengths
        sound = self.lengths > 0
        if len(self.flat):
            sound &= _inside(self.flat, self.begins, ends, most, False)
        if self.labels is not None and len(self.labels):
            sound &= _inside(self.labels, self.begins, ends, most, True)
        return sound

    def fingerprint(self) -> str:
        """Identify the documents by their lengths and content."""
        mark = Fingerprint(len(self.lengths), self.labels is not None)
        return mark.array(self.lengths).array(self.flat).array(self.labels).text()


class TokenStore:
    """Documents of one or several shelves, numbered through.

    >>> store = TokenStore([TokenArray.of([Sample(np.array([5, 6, 7])), Sample(np.array([8, 9]))])])
    >>> plan = Plan(*map(np.array, ([1, 0], [0, 1], [2, 2], [0, 2])))
    >>> rows = store.lay(plan, np.array([0]))
    >>> rows.tokens.tolist(), rows.bounds.tolist()
    ([8, 9, 6, 7], [0, 2, 4])
    """

    def __init__(self, shelves: Sequence[TokenArray]):
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
        """Refuse empty documents, and such as the compiled loops would read past the end of."""
        for first, shelf in zip(self.firsts.tolist(), self.shelves, strict=False):
            if not len(shelf.lengths):
                continue
            if shelf.lengths.min() < 1:
                where = self.place(first + int(np.argmin(shelf.lengths)))
                raise ValueError(f'{where} is empty or holds nulls: on_error="skip" leaves it out')
            begin, end = int(shelf.begins.min()), int((shelf.begins + shelf.lengths).max())
            least = min(len(part) for part in (shelf.flat, shelf.labels) if part is not None)
            if begin < 0 or end > least:
                raise ValueError(
                    f"{shelf.name}: documents reach from {begin} to {end}, it holds {least} tokens"
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

    def lay(
        self,
        plan: Plan,
        packs: np.ndarray,
        align: int = 1,
        pad: int = 0,
        vocab_size: int | None = None,
    ) -> Rows:
        """Lay some packs of a plan end to end; its items are documents of this store.

        An id or label below 0 or beyond the vocabulary is refused, naming its document.
        """
        columns = plan.items, plan.starts, plan.lengths, plan.offsets
        marked = align > 1 or any(shelf.labels is not None for shelf in self.shelves)
        rows, sound = Rows(*_outline(*columns, packs, align, marked)), True
        limit = NO_LIMIT if vocab_size is None else vocab_size
        if len(self.shelves) == 1:
            sound = _fill(self.shelves[0], rows, rows.documents, slice(None), pad, limit)
        else:
            shelf_of = self.shelf_of(rows.documents)
            for number in np.unique(shelf_of):
                some = np.flatnonzero(shelf_of == number)
                own = rows.documents[some] - self.firsts[number]
                sound &= _fill(self.shelves[number], rows, own, some, pad, limit)
        if not sound:
            self._refuse(rows, limit)
        return rows

    def _refuse(self, rows: Rows, limit: int) -> None:
        what, ids = "id", rows.tokens
        bad = (ids < 0) | (ids >= limit)
        if not bad.any():
            what, ids = "label", rows.labels
            bad = ((ids < 0) | (ids >= limit)) & (ids != IGNORE_INDEX)
        place = int(np.argmax(bad))
        segment = int(np.searchsorted(rows.places, place, side="right")) - 1
        where = self.place(int(rows.documents[segment]))
        raise ValueError(
            f"{where} holds the {what} {ids[place]}: ids go "
            f"from 0 to {limit - 1 if limit < NO_LIMIT else 'the vocabulary'}; "
            'on_error="skip" leaves such documents out'
        )

    def wholes(self, rows: Rows) -> np.ndarray | None:
        """int64 [M]: for parts, how many tokens count in the whole document, for others 0."""
        split = rows.lengths < self.lengths[rows.documents]
        if not split.any():
            return None
        documents, places = np.unique(rows.documents[split], return_inverse=True)
        wholes = np.zeros(len(split), np.int64)
        wholes[split] = np.array([self._counted(one) for one in documents.tolist()])[places]
        return wholes

    def _counted(self, document: int) -> int:
        shelf, place = self.find(document)
        if shelf.labels is None:
            return place.stop - place.start - 1
        return int(np.count_nonzero(shelf.labels[place][1:] != IGNORE_INDEX))

    def find(self, document: int) -> tuple[TokenArray, slice]:
        """Give the shelf a document stands on, and its place there."""
        number = int(self.shelf_of(np.array(document)))
        shelf, own = self.shelves[number], document - int(self.firsts[number])
        begin = int(shelf.begins[own])
        return shelf, slice(begin, begin + int(shelf.lengths[own]))

    def place(self, document: int) -> str:
        """Name a document for messages, by its number in its source."""
        one = np.array([document])
        return f"{self.shelves[int(self.shelf_of(one)[0])].name}, document {self.numbers(one)[0]}"

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


class Rows(NamedTuple):
    """P packs of M segments end to end, to be cut into views."""

    tokens: np.ndarray
    labels: np.ndarray
    """Empty where every token but the first of each segment counts: `tokens` say all then."""
    bounds: np.ndarray
    """int32 [M + P]: cu_seqlens of all packs one behind the other, N + 1 entries each."""
    ends: np.ndarray
    """int64 [P+1]: where each pack's tokens end."""
    cuts: np.ndarray
    """int64 [P+1]: where each pack's segments end."""
    documents: np.ndarray
    """int64 [M]."""
    starts: np.ndarray
    """int64 [M]: first token of each segment inside its document."""
    lengths: np.ndarray
    """int64 [M]."""
    places: np.ndarray
    """int64 [M+1]: where each segment begins in `tokens`, and the end of the last."""


def _fill(shelf: TokenArray, rows: Rows, documents: np.ndarray, some, pad: int, limit: int) -> bool:
    """Copy the segments of one shelf to their places; say whether all ids are in the vocabulary."""
    sound = True
    froms = shelf.begins[documents] + rows.starts[some]
    where = froms, rows.lengths[some], rows.places[:-1][some], rows.places[1:][some]
    least, most = _copy(shelf.flat, *where, pad, rows.tokens)
    if len(rows.labels):
        _copy(
            shelf.flat if shelf.labels is None else shelf.labels, *where, IGNORE_INDEX, rows.labels
        )
        rows.labels[where[2]] = IGNORE_INDEX
        sound = shelf.labels is None or _within(rows.labels, *where[2:], limit)
    return sound and least >= 0 and most < limit


@jit
def _outline(items, starts, lengths, offsets, packs, align, marked):
    """Choose the segments of some packs, make room for them, and set their boundaries."""
    count = 0
    for p in packs:
        count += offsets[p + 1] - offsets[p]
    documents, firsts = np.empty(count, np.int64), np.empty(count, np.int64)
    sizes, places = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    ends, cuts = np.zeros(len(packs) + 1, np.int64), np.zeros(len(packs) + 1, np.int64)
    bounds = np.empty(count + len(packs), np.int32)
    at = 0
    for number, p in enumerate(packs):
        bounds[at + number] = 0
        for s in range(offsets[p], offsets[p + 1]):
            documents[at], firsts[at], sizes[at] = items[s], starts[s], lengths[s]
            places[at + 1] = places[at] + -(-lengths[s] // align) * align
            at += 1
            bounds[at + number] = places[at] - ends[number]
        ends[number + 1], cuts[number + 1] = places[at], at
    tokens = np.empty(places[at], np.int64)
    labels = np.empty(places[at] if marked else 0, np.int64)
    return tokens, labels, bounds, ends, cuts, documents, firsts, sizes, places


@jit
def _inside(flat, begins, ends, limit, ignores):
    """Tell of each document whether all its values are ids below a limit, or IGNORE_INDEX."""
    inside = np.empty(len(begins), np.bool_)
    for d in range(len(begins)):
        least = most = np.int64(0)
        for one in flat[begins[d] : ends[d]]:
            value = np.int64(0) if ignores and one == IGNORE_INDEX else np.int64(one)
            least, most = min(least, value), max(most, value)
        inside[d] = least >= 0 and most < limit
    return inside


@jit
def _within(labels, begins, ends, limit):
    """Tell whether the labels of some segments are ids of the vocabulary, or IGNORE_INDEX."""
    least = most = np.int64(0)
    for s in range(len(begins)):
        for i in range(begins[s], ends[s]):
            label = labels[i] if labels[i] != IGNORE_INDEX else np.int64(0)
            least = min(least, label)
            most = max(most, label)
    return least >= 0 and most < limit


@jit
def _copy(flat, froms, lengths, begins, ends, pad, row):
    """Copy segments to their places and pad behind them; gives the least and the most copied."""
    least = most = flat[froms[0]]
    for s in range(len(froms)):
        begin, n = froms[s], lengths[s]
        values, to = flat[begin : begin + n], row[begins[s] : ends[s]]
        for i in range(n):
            to[i] = values[i]
        for i in range(n):  # apart from the copy: of narrow values many are compared at a time
            least = min(least, values[i])
            most = max(most, values[i])
        for i in range(n, len(to)):
            to[i] = pad
    return least, most
