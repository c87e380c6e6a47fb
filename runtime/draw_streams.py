"""Number the calls of generation per stream: keys of their random draws, kept in checkpoints.

Generation draws its numbers from a key, not from a generator: (run's seed, stream, number of the
call in that stream, prompt, sample, position). A call is numbered here:

    engine.generate(...)         "direct"       0, 1, 2, …
    GenerationEval "gsm8k"       "eval/gsm8k"   0, 1, 2, …      an evaluation changes no other draws

Like the global generators, the counters belong to the process, so that a new engine does not repeat
the draws of an earlier one. Trainers keep them in their checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

DIRECT = "direct"

_stream: ContextVar[str] = ContextVar("nopad_draw_stream", default=DIRECT)
_counts: dict[str, int] = {}
_counting = Lock()


@contextmanager
def draw_stream(name: str) -> Iterator[None]:
    """Number the calls inside in a separate stream; if blocks are nested, the outermost counts."""
    token = _stream.set(name) if _stream.get() == DIRECT else None
    try:
        yield
    finally:
        if token is not None:
            _stream.reset(token)


def number_call(kind: str = "") -> tuple[str, int]:
    """Return the current stream, and the number of this call in it.

    kind: a part of the stream that is numbered separately.

    >>> with draw_stream("example"):
    ...     number_call(), number_call()
    (('example', 0), ('example', 1))
    """
    stream = _stream.get() + kind
    with _counting:
        number = _counts.get(stream, 0)
        _counts[stream] = number + 1
    return stream, number


def draw_counts() -> dict[str, int]:
    """Return how many calls each stream has had, for a checkpoint."""
    with _counting:
        return dict(_counts)


def load_draw_counts(counts: Mapping[str, int]) -> None:
    """Continue the streams of a checkpoint; streams that it does not know start over."""
    with _counting:
        _counts.clear()
        _counts.update(counts)


def merge_draw_counts(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Merge the counts of all ranks so that none repeats a call.

    >>> merge_draw_counts([{"direct": 3}, {"direct": 2, "eval/": 1}])
    {'direct': 3, 'eval/': 1}
    """
    merged: dict[str, int] = {}
    for counts in ranks:
        for stream, count in counts.items():
            merged[stream] = max(count, merged.get(stream, 0))
    return merged
