"""The documents that training is measured on: random tokens with natural lengths."""

from __future__ import annotations

import numpy as np
from nopad.packing import IGNORE_INDEX

ANSWER_FRACTION = 0.4
"""The fraction of a document that has labels in the variants named sft."""


def random_documents(budget: int, packs: int, vocab_size: int, max_length: int) -> list[np.ndarray]:
    """Draw random tokens with the lengths of a corpus: log-normal, median 400, 16 and more."""
    rng = np.random.default_rng(0)
    lengths, total = [], 0
    while total < budget * packs:
        lengths.append(int(np.clip(rng.lognormal(np.log(400), 1.0), 16, max_length)))
        total += lengths[-1]
    return [rng.integers(0, vocab_size, n) for n in lengths]


def answer_labels(ids: np.ndarray) -> np.ndarray:
    """Label only the last part of a document."""
    prompt_length = len(ids) - round(ANSWER_FRACTION * len(ids))
    return np.where(np.arange(len(ids)) < prompt_length, IGNORE_INDEX, ids)


def long_documents(row: int) -> list[np.ndarray]:
    """Return rows whose first half is one document and whose second half are short ones."""
    rng, documents = np.random.default_rng(1), []
    for _ in range(4):
        lengths = [row // 2 + 1]  # so that no row has two of them
        while sum(lengths) < row:
            length = int(np.clip(rng.lognormal(np.log(400), 1.0), 16, 4096))
            lengths.append(min(length, row - sum(lengths)))
        documents += [rng.integers(0, 1000, length) for length in lengths]
    return documents
