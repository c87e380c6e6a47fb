"""What a dataset consists of: loss tokens, duplicates, extreme lengths, tokens by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from ...packing import IGNORE_INDEX

EXTREMES = 3
"""Samples to name of each kind."""
MAX_LOCATIONS = 1000
"""Samples to name of each kind in JSON: to number a line, the file before it is read."""


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


def sample_figures(
    composition: Composition,
    empty_answers: list[int],
    lengths: np.ndarray,
    limit: int,
    locate: Callable[[int], str],
    max_locations: int = EXTREMES,
) -> dict[str, Any]:
    """Return what the samples consist of, and where those with a defect or an extreme length are.

    empty_answers: samples with an empty turn of the assistant.
    limit: a longer sample is too long.
    locate: returns the location of a sample, by its number.
    """

    def found(samples: Sequence[int]) -> dict[str, Any]:
        return {"count": len(samples), "locations": list(map(locate, samples[:max_locations]))}

    def extremes(samples: np.ndarray) -> list[dict[str, Any]]:
        first = samples[:EXTREMES].tolist()
        return [{"tokens": int(lengths[i]), "location": locate(i)} for i in first]

    order = np.argsort(lengths, kind="stable")
    return {
        "examined_samples": composition.samples,
        "in_the_loss": composition.loss_tokens / max(1, composition.tokens),
        "without_labels": found(composition.unlabelled),
        "duplicates": found(composition.repeated),
        "empty_answers": found(empty_answers),
        "longest": extremes(order[::-1]),
        "shortest": extremes(order),
        "too_long": found(np.flatnonzero(lengths > limit).tolist()),
    }


def sample_lines(figures: dict[str, Any], total: int | None, fate: str) -> list[str]:
    """Describe the samples in lines.

    figures: those of `sample_figures`.
    total: how many samples there are; None if that is unknown.
    fate: what happens to samples that are too long.
    """
    examined = figures["examined_samples"]
    kinds = ["without_labels", "duplicates"]
    kinds += ["empty_answers"] if figures["empty_answers"]["count"] else []
    parts = [f"in the loss: {figures['in_the_loss']:.1%} of the tokens"]
    parts += [_count_line(kind.replace("_", " "), figures[kind]) for kind in kinds]
    longest, shortest = (_extreme_line(name, figures[name]) for name in ("longest", "shortest"))
    return [
        ("" if examined == total else f"the first {examined:,} samples: ") + "; ".join(parts),
        f"{longest}; {_count_line(fate, figures['too_long'])}",
        shortest,
    ]


def _count_line(name: str, found: dict[str, Any]) -> str:
    count, first = found["count"], found["locations"][:EXTREMES]
    if not count:
        return f"{name}: 0"
    return f"{name}: {count:,} ({join_locations(first)}{', ...' if count > len(first) else ''})"


def _extreme_line(name: str, found: list[dict[str, Any]]) -> str:
    tokens = ", ".join(f"{each['tokens']:,}" for each in found)
    return f"{name}: {tokens} tokens ({join_locations([each['location'] for each in found])})"


def join_locations(locations: Sequence[str]) -> str:
    """Join locations; those of one file name it once.

    >>> join_locations(["a.jsonl, line 4", "a.jsonl, line 7"]), join_locations(["sample 3"])
    ('a.jsonl, lines 4, 7', 'sample 3')
    """
    files, numbers = zip(*(each.rpartition(" ")[::2] for each in locations), strict=True)
    if len(locations) == 1 or len(set(files)) > 1:
        return "; ".join(locations)
    return f"{files[0]}s {', '.join(numbers)}"


def role_figures(chats: Iterable[tuple[Sequence[Any], int]], encode: Any) -> dict[str, Any]:
    """Return the number of chats, and the shares of their tokens by role; nothing without chats.

    The rest are the tokens of the template, of tool calls and of content that is not text.

    chats: the messages of each chat, and its number of tokens.
    encode: tokenizes a text.

    >>> messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    >>> role_figures([(messages, 4)], list)
    {'chats': 1, 'shares': {'user': 0.5, 'assistant': 0.25, 'template': 0.25}}
    """
    roles: Counter[str] = Counter()
    num_chats = total = 0
    for messages, num_tokens in chats:
        num_chats, total = num_chats + 1, total + num_tokens
        for message in messages:
            content = message.get("content")
            roles[message["role"]] += len(encode(content)) if isinstance(content, str) else 0
    if not num_chats:
        return {}
    counts = {**dict(roles.most_common()), "template": max(0, total - sum(roles.values()))}
    return {"chats": num_chats, "shares": {r: n / max(1, total) for r, n in counts.items()}}


def role_line(figures: dict[str, Any]) -> str:
    """Describe the figures of `role_figures`."""
    text = ", ".join(f"{role} {share:.1%}" for role, share in figures["shares"].items())
    return f"tokens by role in {figures['chats']:,} chats: {text}"
