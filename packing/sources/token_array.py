"""Documents in one flat array: in memory, memory-mapped from a file of any size, or remote.

flat    [ a a a a b b c c c ]
begins  [ 0       4   6     ]
lengths [ 4       2   3     ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..numba_jit import jit
from ..sample import IGNORE_INDEX, Sample
from ..state.fingerprint import Fingerprint
from ..token_ids import MAX_TOKEN_ID
from .mapped_file import MappedFile
from .mapped_index import MappedBegins, chunks
from .remote import RemoteTokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenArray:
    """Documents in one flat array; a store has one per file, or per source of a mixture."""

    name: str
    flat: np.ndarray | RemoteTokens
    """Token ids of any integer type."""
    begins: np.ndarray | MappedBegins
    """int64 [n]: start of each document in `flat`."""
    lengths: np.ndarray
    """[n]: tokens of each document."""
    labels: np.ndarray | None = None
    """As long as `flat`; None: every token of a document but its first is a label."""
    source: int = 0
    file: MappedFile | None = None
    """The file that `flat` maps, if it is one."""

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
        return cls(name, flat, begins, lengths, explicit, source)

    def check_file(self) -> None:
        """Raise if the mapped file was truncated: reading beyond its end would kill the process."""
        if self.file is not None:
            self.file.check(self.flat.nbytes)

    def valid_mask(self, vocab_size: int | None = None) -> np.ndarray:
        """bool [n]: which documents have tokens, and only ids from 0 to below the vocab size."""
        self.check_file()
        limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
        begins = np.asarray(self.begins)
        ends = begins + self.lengths
        valid = self.lengths > 0
        if isinstance(self.flat, RemoteTokens):
            for some, flat, first in self.flat.documents(begins, ends):
                bounds = begins[some] - first, ends[some] - first
                valid[some] &= documents_in_range(flat, *bounds, limit, False)
        elif len(self.flat):
            valid &= documents_in_range(self.flat, begins, ends, limit, False)
        if self.labels is not None and len(self.labels):
            valid &= documents_in_range(self.labels, begins, ends, limit, True)
        return valid

    def extent(self) -> tuple[int, int]:
        """Return the first token of any document, and the end of the last."""
        first, end = len(self.flat), 0
        for some in chunks(len(self.lengths)):
            begins = self.begins[some]
            first = min(first, int(begins.min()))
            end = max(end, int((begins + self.lengths[some]).max()))
        return first, end

    def unshifted_mask(self) -> np.ndarray:
        """bool [n]: which documents have labels that are their own tokens."""
        if self.labels is None:
            return np.ones(len(self.lengths), bool)
        begins = np.asarray(self.begins)
        return documents_unshifted(self.flat, self.labels, begins, begins + self.lengths)

    def fingerprint(self) -> str:
        """Identify the documents by their lengths and content."""
        self.check_file()
        fingerprint = Fingerprint(len(self.lengths), self.labels is not None)
        fingerprint.array(self.lengths, np.dtype(np.int64))
        return fingerprint.array(self.flat).array(self.labels).text()


@jit
def documents_in_range(flat, begins, ends, limit, are_labels):
    """Return for each document whether its ids are in 0 .. limit - 1; labels may be ignored."""
    in_range = np.empty(len(begins), np.bool_)
    for d in range(len(begins)):
        smallest = largest = np.int64(0)
        for token in flat[begins[d] : ends[d]]:
            value = np.int64(0) if are_labels and token == IGNORE_INDEX else np.int64(token)
            smallest, largest = min(smallest, value), max(largest, value)
        in_range[d] = smallest >= 0 and largest < limit
    return in_range


@jit
def documents_unshifted(flat, labels, begins, ends):
    """Return for each document whether every label is its own token, or ignored."""
    unshifted = np.empty(len(begins), np.bool_)
    for d in range(len(begins)):
        odd = 0
        for i in range(begins[d], ends[d]):
            odd += (labels[i] != flat[i]) & (labels[i] != IGNORE_INDEX)
        unshifted[d] = odd == 0
    return unshifted
