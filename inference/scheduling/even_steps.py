"""Pause short requests of known length, so that steps stay equally large until the end.

    requests    all at once ▇▅▃▂▂▁▁▁▁▁      evened out ▃▃▃▃▃▃▃▃▃▃
    in a step               steps ──▶                  steps ──▶

The longest request takes a step per token, and every step reads all weights. If short requests
start with it, the first steps have very many rows and the last ones few, which do not keep the
memory busy. Equal steps take less time together, as long as they are small. Nothing is gained where
a token or a string may end a request: its length is unknown then, and more requests at once are
better. Nor where rows or pages are short: paused requests keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..requests.request import Request

MIN_REQUESTS = 128
"""At least as many requests run: with fewer, steps hardly become shorter on an H200."""
MAX_REQUESTS = 256
"""If more would have to run at a time, none pauses: rows of larger steps cost less each."""
ROW_STEP = 64
"""Steps of more requests are padded to a multiple of this."""
STEPS_PER_TURN = 16
"""Most steps after which the requests that run are chosen again."""
MIN_TURNS = 32
"""At least as often they are chosen until the longest ends, so that all others end with it."""


class EvenSteps:
    """Which running requests pause now."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Start with none; the arguments are those of the KV cache."""
        self._num_pages = num_pages
        self._page_size = page_size
        self._paused: Collection[Request] = ()
        self._num_running = 0
        self._steps_left = 0

    def paused(
        self, running: Sequence[Request], queue: Sequence[tuple[Any, Request]], max_num_seqs: int
    ) -> Collection[Request]:
        """Return the requests that the next step does not run.

        queue: the waiting requests, with their sort keys.
        """
        self._steps_left -= 1
        if self._steps_left < 0 or len(running) != self._num_running:
            self._num_running, self._steps_left = len(running), STEPS_PER_TURN - 1
            self._paused = ()
            has_rows = MIN_REQUESTS < len(running) <= max_num_seqs - len(queue)
            if has_rows and running[0].may_pause:
                requests = [*running, *(request for _, request in queue)]
                self._paused = requests_to_pause(requests) if self._have_pages(requests) else ()
                longest = max([r.num_to_sample for r in requests])
                self._steps_left = min(self._steps_left, longest // MIN_TURNS)
        return self._paused

    def _have_pages(self, requests: Sequence[Request]) -> bool:
        """Whether the cache has pages for all requests at their ends: none is preempted then."""
        size = self._page_size
        return sum([-(-(r.max_len - 1) // size) for r in requests]) <= self._num_pages


def requests_to_pause(requests: Sequence[Request]) -> Collection[Request]:
    """Return those of all requests that can pause without more steps for all.

    With R requests in a step, those with the most tokens left, all end with the longest if
    R times its tokens are no fewer than the tokens of all. Prompts do not pause.
    """
    if {(r.may_pause, r.priority) for r in requests} != {(True, requests[0].priority)}:
        return ()
    all_left = [r.max_len - r.num_tokens for r in requests]
    num_rows = -(-sum(all_left) // max(*all_left, 1))
    num_rows = max(-(-num_rows // ROW_STEP) * ROW_STEP, MIN_REQUESTS)
    if num_rows > MAX_REQUESTS:
        return ()
    decoding = [
        (-left, index)
        for index, (left, r) in enumerate(zip(all_left, requests, strict=True))
        if r.num_tokens > r.prompt_len and r.num_tokens - r.num_computed <= 1
    ]
    decoding.sort()
    return {requests[index] for _, index in decoding[num_rows:]}
