"""`TokenStore`: documents in flat token arrays, with known lengths; it copies packs out of them.

    flat    [ a a a a b b c c c ]    in memory, memory-mapped from a file of any size, or remote
    begins  [ 0       4   6     ]
    lengths [ 4       2   3     ]

One compiled loop gathers the tokens of several packs, so no Python runs per document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..numba_jit import jit
from ..planning.planner import Plan
from ..sample import IGNORE_INDEX, Sample
from ..state.fingerprint import Fingerprint
from ..token_ids import MAX_TOKEN_ID
from .document_checks import documents_unshifted, invalid_error
from .mapped_file import MappedFile
from .mapped_index import MappedBegins, SummedBegins, chunks, join_lengths
from .remote import RemoteTokens, read_together


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
    """Documents in one flat array; a store has one per file, or per source of a mixture."""

    name: str
    flat: np.ndarray | RemoteTokens
    """Token ids of any integer type."""
    begins: np.ndarray | MappedBegins | SummedBegins
    """int64 [n]: start of each document in `flat`."""
    lengths: np.ndarray
    """[n]: tokens of each document."""
    labels: np.ndarray | RemoteTokens | None = None
    """As long as `flat`: the labels, or as bool which tokens are; None: all but a document's first.
    """
    source: int = 0
    file: MappedFile | None = None
    """The file that `flat` maps, if any."""
    manifest: Mapping[str, Any] | None = None
    """What is known of a corpus that this is a shard of: its content was checked when written."""
    targets: Sequence[Any] = ()
    """The target of each document (`targets.py`), if they have one."""
    images: Sequence[Any] = ()
    """The images of each document (`images.py`), if any has some."""

    @property
    def is_remote(self) -> bool:
        return isinstance(self.flat, RemoteTokens)

    @classmethod
    def of(cls, samples: Sequence[Sample], name: str = "samples", source: int = 0) -> TokenArray:
        """Concatenate samples in memory."""
        lengths = np.array([len(sample) for sample in samples], np.int64)
        empty = np.empty(0, np.int64)
        flat = np.concatenate([empty, *(sample.tokens for sample in samples)])
        labels = np.concatenate([empty, *(sample.labels for sample in samples)])
        begins = np.cumsum(lengths) - lengths
        default_labels = flat.copy()
        default_labels[begins] = IGNORE_INDEX
        explicit = None if np.array_equal(default_labels, labels) else labels
        targets = [sample.target for sample in samples]
        targets = () if all(target is None for target in targets) else targets
        images = [sample.images for sample in samples]
        images = images if any(images) else ()
        return cls(name, flat, begins, lengths, explicit, source, targets=targets, images=images)

    def check_file(self) -> None:
        """Raise if the mapped file was truncated: reading beyond its end would kill the process."""
        if self.file is not None:
            self.file.check(self.flat.nbytes)

    def extent(self) -> tuple[int, int]:
        """Return the first token of any document, and the end of the last."""
        first, end = len(self.flat), 0
        for some in chunks(len(self.lengths)):
            begins = self.begins[some]
            first = min(first, int(begins.min()))
            end = max(end, int((begins + self.lengths[some]).max()))
        return first, end

    def labels_of(self, tokens: slice) -> np.ndarray | None:
        """Return the labels of a document; None: all tokens but its first."""
        if self.labels is None:
            return None
        labels = self.labels[tokens]
        if labels.dtype != np.bool_:
            return labels
        return np.where(labels, self.flat[tokens].astype(np.int64), IGNORE_INDEX)

    def fingerprint(self) -> str:
        """Identify the documents by their lengths and content."""
        self.check_file()
        tokens = tokens_fingerprint(self.lengths, self.flat, self.labels)
        if not self.targets and not self.images:
            return tokens
        images = [each and each.fingerprint() for each in self.images]
        return Fingerprint(tokens, *images).row(list(self.targets)).text()


def tokens_fingerprint(lengths: Any, flat: Any, labels: Any) -> str:
    """Identify documents by their lengths and content."""
    fingerprint = Fingerprint(len(lengths), labels is not None)
    return fingerprint.array(lengths, np.dtype(np.int64)).array(flat).array(labels).text()


class TokenStore:
    """Documents of one or several token arrays, numbered consecutively.

    >>> from nopad.packing import Sample
    >>> store = TokenStore([TokenArray.of([Sample(np.array([5, 6, 7])), Sample(np.array([8, 9]))])])
    >>> plan = Plan(*map(np.array, ([1, 0], [0, 1], [2, 2], [0, 2])))
    >>> rows = store.gather(plan, np.array([0]))
    >>> rows.tokens.tolist(), rows.cu_seqlens.tolist()
    ([8, 9, 6, 7], [0, 2, 4])
    """

    def __init__(self, arrays: Sequence[TokenArray]):
        self.arrays = list(arrays)
        self.first_documents = np.cumsum([0, *(len(array.lengths) for array in arrays)])
        self.lengths = join_lengths([array.lengths for array in arrays])
        first_of = {array.source: i for i, array in reversed(list(enumerate(self.arrays)))}
        self._source_firsts = np.array(
            [self.first_documents[first_of[array.source]] for array in self.arrays]
        )

    def __len__(self) -> int:
        return int(self.first_documents[-1])

    @property
    def is_remote(self) -> bool:
        return any(array.is_remote for array in self.arrays)

    def check(self) -> None:
        """Raise on empty documents, and on documents that end after their array."""
        for first, array in zip(self.first_documents.tolist(), self.arrays, strict=False):
            if not len(array.lengths) or array.manifest is not None:
                continue
            if array.lengths.min() < 1:
                location = self.location(first + int(np.argmin(array.lengths)))
                raise ValueError(
                    f'{location} is empty or has nulls: pass on_error="skip" to skip it'
                )
            begin, end = array.extent()
            size = min(len(ids) for ids in (array.flat, array.labels) if ids is not None)
            if begin < 0 or end > size:
                raise ValueError(
                    f"{array.name}: documents range from {begin} to {end}, it has {size} tokens"
                )

    def source_bounds(self, num_sources: int) -> list[int]:
        """Return the first document of each source, and the end."""
        counts = np.zeros(num_sources, np.int64)
        for array in self.arrays:
            counts[array.source] += len(array.lengths)
        return [0, *np.cumsum(counts).tolist()]

    def fingerprint(self) -> str:
        """Identify all documents."""
        parts: list[str] = []
        for _, shards in groupby(self.arrays, lambda array: id(array.manifest)):
            arrays = list(shards)
            if arrays[0].manifest is not None:
                parts.append(arrays[0].manifest["fingerprint"])
            else:
                parts += [array.fingerprint() for array in arrays]
        return Fingerprint(*parts).text()

    def gather(
        self,
        plan: Plan,
        packs: np.ndarray,
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        vocab_size: int | None = None,
    ) -> PackedRows:
        """Copy some packs of a plan into one row; the plan's items are documents of this store.

        Raises on an id or label below 0 or beyond the vocabulary, and on a label that is not its
        token, naming the document.
        """
        columns = plan.items, plan.starts, plan.lengths, plan.offsets
        labeled = pad_to_multiple_of > 1 or any(a.labels is not None for a in self.arrays)
        rows = PackedRows(*_allocate_rows(*columns, packs, pad_to_multiple_of, labeled))
        limit, valid = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size, True
        if len(self.arrays) == 1:
            valid = _copy_documents(
                self.arrays[0], rows, rows.documents, slice(None), pad_token_id, limit
            )
        else:
            array_of = self.array_of(rows.documents)

            def copy(number: int) -> bool:
                segments = np.flatnonzero(array_of == number)
                documents = rows.documents[segments] - self.first_documents[number]
                array = self.arrays[number]
                return _copy_documents(array, rows, documents, segments, pad_token_id, limit)

            # Remote shards are requested together.
            run = read_together if self.is_remote else map
            valid = all(list(run(copy, np.unique(array_of).tolist())))
        if not valid:
            raise invalid_error(self, rows, limit)
        return rows

    def parent_label_counts(self, rows: PackedRows) -> np.ndarray | None:
        """int64 [M]: for parts, the label count of the full document, otherwise 0."""
        is_part = rows.lengths < self.lengths[rows.documents]
        if not is_part.any():
            return None
        documents, inverse = np.unique(rows.documents[is_part], return_inverse=True)
        counts = np.zeros(len(is_part), np.int64)
        counts[is_part] = np.array([self._label_count(d) for d in documents.tolist()])[inverse]
        return counts

    def _label_count(self, document: int) -> int:
        array, tokens = self.locate(document)
        labels = array.labels_of(tokens)
        if labels is None:
            return tokens.stop - tokens.start - 1
        return int(np.count_nonzero(labels[1:] != IGNORE_INDEX))

    def attached(self, name: str, rows: PackedRows) -> list[Any]:
        """Return the `targets` or `images` of each segment's document; [] if none has any."""
        if not any(getattr(array, name) for array in self.arrays):
            return []
        numbers = self.array_of(rows.documents)
        indices = (rows.documents - self.first_documents[numbers]).tolist()
        of_arrays = (getattr(self.arrays[number], name) for number in numbers.tolist())
        return [of[i] if of else None for of, i in zip(of_arrays, indices, strict=True)]

    def locate(self, document: int) -> tuple[TokenArray, slice]:
        """Return the array of a document, and the slice of its tokens there."""
        number = int(self.array_of(np.array(document)))
        array, index = self.arrays[number], document - int(self.first_documents[number])
        array.check_file()
        begin = int(array.begins[index])
        return array, slice(begin, begin + int(array.lengths[index]))

    def location(self, document: int) -> str:
        """Name a document for messages, by its number in its source."""
        one = np.array([document])
        array = self.arrays[int(self.array_of(one)[0])]
        return f"{array.name}, document {self.numbers_in_source(one)[0]}"

    def array_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the index of each document's array."""
        return np.searchsorted(self.first_documents, documents, side="right") - 1

    def sources(self, documents: np.ndarray) -> np.ndarray:
        """int16: index of the mixture's source of each document."""
        if len(self.arrays) == 1:
            return np.full(len(documents), self.arrays[0].source, np.int16)
        source_of_array = np.array([array.source for array in self.arrays], np.int16)
        return source_of_array[self.array_of(documents)]

    def numbers_in_source(self, documents: np.ndarray) -> np.ndarray:
        """int64: the number of each document in its own source."""
        if len(self.arrays) == 1:
            return documents
        return documents - self._source_firsts[self.array_of(documents)]


class PackedRows(NamedTuple):
    """P packs of M segments in one row, to be cut into views."""

    tokens: np.ndarray
    labels: np.ndarray
    """Empty if every token but the first of each segment is a label."""
    cu_seqlens: np.ndarray
    """int32 [M + P]: cu_seqlens of all packs, N + 1 entries each, concatenated."""
    pack_ends: np.ndarray
    """int64 [P+1]: where each pack's tokens end."""
    segment_ends: np.ndarray
    """int64 [P+1]: where each pack's segments end."""
    documents: np.ndarray
    """int64 [M]."""
    starts: np.ndarray
    """int64 [M]: first token of each segment inside its document."""
    lengths: np.ndarray
    """int64 [M]."""
    segment_starts: np.ndarray
    """int64 [M+1]: where each segment begins in `tokens`, and the end of the last."""


def _copy_documents(
    array: TokenArray,
    rows: PackedRows,
    documents: np.ndarray,
    segments,
    pad_token_id: int,
    limit: int,
) -> bool:
    """Copy the segments of one array into the row; return whether all ids are below the limit."""
    array.check_file()
    froms = array.begins[documents] + rows.starts[segments]
    begins, ends = rows.segment_starts[:-1][segments], rows.segment_starts[1:][segments]
    lengths, valid, flat = rows.lengths[segments], True, array.flat
    mask = array.labels if array.labels is not None and array.labels.dtype == np.bool_ else None
    mask_froms = froms
    if isinstance(mask, RemoteTokens):
        mask, mask_froms = mask.segments(froms, lengths)
    if isinstance(flat, RemoteTokens):
        flat, froms = flat.segments(froms, lengths)
    smallest, largest = _copy(flat, froms, lengths, begins, ends, pad_token_id, rows.tokens)
    if mask is not None:
        _copy_marked(rows.tokens, mask, mask_froms, lengths, begins, ends, rows.labels)
    elif len(rows.labels):
        labels = flat if array.labels is None else array.labels
        _copy(labels, froms, lengths, begins, ends, IGNORE_INDEX, rows.labels)
        rows.labels[begins] = IGNORE_INDEX
        # A label that is its own token is in range if the token is.
        valid = array.labels is None or bool(
            documents_unshifted(flat, labels, froms, froms + lengths).all()
        )
    return valid and smallest >= 0 and largest < limit


@jit
def _allocate_rows(items, starts, lengths, offsets, packs, multiple, labeled):
    """Select the segments of some packs, allocate their row, and set the boundaries."""
    count = 0
    for p in packs:
        count += offsets[p + 1] - offsets[p]
    documents, firsts = np.empty(count, np.int64), np.empty(count, np.int64)
    sizes, segment_starts = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    pack_ends = np.zeros(len(packs) + 1, np.int64)
    segment_ends = np.zeros(len(packs) + 1, np.int64)
    cu_seqlens = np.empty(count + len(packs), np.int32)
    n = 0
    for number, p in enumerate(packs):
        cu_seqlens[n + number] = 0
        for s in range(offsets[p], offsets[p + 1]):
            documents[n], firsts[n], sizes[n] = items[s], starts[s], lengths[s]
            segment_starts[n + 1] = segment_starts[n] + -(-lengths[s] // multiple) * multiple
            n += 1
            cu_seqlens[n + number] = segment_starts[n] - pack_ends[number]
        pack_ends[number + 1], segment_ends[number + 1] = segment_starts[n], n
    tokens = np.empty(segment_starts[n], np.int64)
    labels = np.empty(segment_starts[n] if labeled else 0, np.int64)
    return (
        tokens,
        labels,
        cu_seqlens,
        pack_ends,
        segment_ends,
        documents,
        firsts,
        sizes,
        segment_starts,
    )


@jit
def _copy_marked(tokens, mask, froms, lengths, begins, ends, labels):
    """Write the labels of segments into the row: the token where the mask is set."""
    for s in range(len(froms)):
        begin, first, n = froms[s], begins[s], lengths[s]
        for i in range(ends[s] - first):
            is_label = 0 < i < n and mask[begin + i]
            labels[first + i] = tokens[first + i] if is_label else IGNORE_INDEX


@jit
def _copy(flat, froms, lengths, begins, ends, pad, row):
    """Copy segments into the row and pad after them; return the smallest and largest copied."""
    smallest = largest = flat[froms[0]]
    for s in range(len(froms)):
        begin, n = froms[s], lengths[s]
        values, target = flat[begin : begin + n], row[begins[s] : ends[s]]
        for i in range(n):
            target[i] = values[i]
        for i in range(n):  # a separate loop: comparisons of narrow values are vectorized
            smallest = min(smallest, values[i])
            largest = max(largest, values[i])
        for i in range(n, len(target)):
            target[i] = pad
    return smallest, largest
