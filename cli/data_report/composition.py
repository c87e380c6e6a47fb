"""What a dataset consists of: loss tokens, duplicates, extreme lengths, tokens by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from ...packing import IGNORE_INDEX

EXTREMES = 3
"""Samples to name of each kind."""


@dataclass(slots=True)
class Composition:
    """Counts of the samples that were added."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    unlabelled: list[int] = field(default_factory=list)
    """Samples without labels."""
    repeated: list[int] = field(default_factory=list)
    """Samples with the tokens and labels of an earlier one."""
    _digests: set[bytes] = field(default_factory=set)

    def add(self, tokens: np.ndarray, labels: np.ndarray | None) -> None:
        """Count a sample; labels: None if all tokens but the first are.

        >>> counts = Composition()
        >>> counts.add(np.array([5, 6]), None)
        >>> counts.add(np.array([5, 6]), np.array([-100, -100]))
        >>> counts.loss_tokens, counts.unlabelled, counts.repeated
        (1, [1], [])
        """
        is_label = (tokens if labels is None else labels)[1:] != IGNORE_INDEX
        num_labels = int(is_label.sum())
        content = np.asarray(tokens, np.int64).tobytes() + np.packbits(is_label).tobytes()
        digest = blake2b(content, digest_size=16).digest()
        if not num_labels:
            self.unlabelled.append(self.samples)
        if digest in self._digests:
            self.repeated.append(self.samples)
        self._digests.add(digest)
        self.samples, self.tokens = self.samples + 1, self.tokens + len(tokens)
        self.loss_tokens += num_labels

    def line(self, total: int | None) -> str:
        """Describe the samples. total: how many there are; None if that is unknown."""
        first = "" if self.samples == total else f"the first {self.samples:,} samples: "
        parts = [
            f"in the loss: {self.loss_tokens / max(1, self.tokens):.1%} of the tokens",
            named_count("without labels", self.unlabelled),
            named_count("duplicates", self.repeated),
        ]
        return first + "; ".join(parts)


def extreme_lines(lengths: np.ndarray, limit: int, too_long: str) -> list[str]:
    """Name the longest and shortest samples, and the first that are longer than `limit`.

    too_long: what happens to these.

    >>> extreme_lines(np.array([4, 9, 2, 7]), 8, "split")[0]
    'longest: 9, 7, 4 tokens (samples 1, 3, 0); split: 1 (samples 1)'
    """
    order = np.argsort(lengths, kind="stable")
    longest, shortest = (
        f"{name}: {', '.join(f'{n:,}' for n in lengths[samples].tolist())} tokens "
        f"(samples {', '.join(map(str, samples.tolist()))})"
        for name, samples in (("longest", order[::-1]), ("shortest", order))
        for samples in [samples[:EXTREMES]]
    )
    cut = named_count(too_long, np.flatnonzero(lengths > limit).tolist())
    return [f"{longest}; {cut}", shortest]


def named_count(name: str, samples: Sequence[int]) -> str:
    """Return the number of some samples, and the first of them.

    >>> named_count("duplicates", [4, 7, 8, 9])
    'duplicates: 4 (samples 4, 7, 8, ...)'
    """
    first = ", ".join(map(str, samples[:EXTREMES])) + ", ..." * (len(samples) > EXTREMES)
    return f"{name}: {len(samples):,}" + (f" (samples {first})" if samples else "")


def role_line(chats: Iterable[tuple[Sequence[Any], int]], encode: Any) -> str | None:
    """Return the shares of the tokens of chats by role; None without chats.

    The rest are the tokens of the template, of tool calls and of content that is not text.

    chats: the messages of each chat, and its number of tokens.
    encode: tokenizes a text.

    >>> messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    >>> role_line([(messages, 4)], list)
    'tokens by role in 1 chats: user 50.0%, assistant 25.0%, template 25.0%'
    """
    roles: Counter[str] = Counter()
    num_chats = total = 0
    for messages, num_tokens in chats:
        num_chats, total = num_chats + 1, total + num_tokens
        for message in messages:
            content = message.get("content")
            roles[message["role"]] += len(encode(content)) if isinstance(content, str) else 0
    if not num_chats:
        return None
    shares = {**dict(roles.most_common()), "template": max(0, total - sum(roles.values()))}
    text = ", ".join(f"{role} {tokens / max(1, total):.1%}" for role, tokens in shares.items())
    return f"tokens by role in {num_chats:,} chats: {text}"
