"""Hold short requests of known length back, so that steps stay equally large until all end.

    requests    all at once ▇▅▃▂▂▁▁▁▁▁      evened out ▃▃▃▃▃▃▃▃▃▃
    in a step               steps ──▶                  steps ──▶

The longest request takes a step per token, and every step reads all weights. If short requests
start with it, the first steps have very many rows and the last ones few. A step's time grows faster
with its rows the more it has, and few rows do not keep the memory busy: equal steps take less time
together. Nothing is gained where a token or a string may end a request: its length is unknown then,
and more requests at once are better. Nor where pages are short: held requests keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from ..requests.request import Request

MIN_RUNNING = 128
"""Requests that are never held back: with fewer, steps hardly become shorter on an H200."""
ROW_STEP = 64
"""Steps of more requests are padded to a multiple of this."""
STEPS_PER_TURN = 4
"""Steps after which the requests that run are chosen anew."""
_MAX_WAITING = 1024
"""Requests in the queue that are looked at; with more, no request is held back yet."""


class EvenSteps:
    """Which running requests are held back now, over a cache of so many pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._held: Collection[Request] = ()
        self._num_running = 0
        self._steps_left = 0

    def held(
        self, running: Sequence[Request], queue: Sequence[tuple[Any, Request]]
    ) -> Collection[Request]:
        """Return the requests that the next step leaves out.

        queue: the waiting requests, with their sort keys.
        """
        self._steps_left -= 1
        if self._steps_left < 0 or len(running) != self._num_running:
            self._num_running, self._steps_left = len(running), STEPS_PER_TURN - 1
            self._held = ()
            if len(running) > MIN_RUNNING and len(queue) <= _MAX_WAITING:
                requests = [*running, *(request for _, request in queue)]
                if self._all_fit(requests):
                    self._held = requests_to_hold(requests)
        return self._held

    def _all_fit(self, requests: Sequence[Request]) -> bool:
        """Whether the cache holds all requests at their ends, so that none is preempted."""
        size = self._page_size
        return sum(-(-(r.max_len - 1) // size) for r in requests) <= self._num_pages


def requests_to_hold(requests: Sequence[Request]) -> Collection[Request]:
    """Return those of all unfinished requests that the next step can leave out.

    With R requests in a step, those with the most tokens left, all end with the longest if
    R times its tokens are no fewer than the tokens of all. Prompts are never left out.
    """
    priority, all_left, longest, decoding = requests[0].priority, 0, 1, []
    for request in requests:
        if not request.length_is_known or request.priority != priority:
            return ()
        left = request.max_len - request.num_tokens
        all_left += left
        longest = max(longest, left)
        if request.row >= 0 and request.num_tokens - request.num_computed <= 1:
            decoding.append((left, request))
    num_running = -(-all_left // longest)
    num_running = max(-(-num_running // ROW_STEP) * ROW_STEP, MIN_RUNNING)
    if num_running >= len(decoding):
        return ()
    decoding.sort(key=itemgetter(0), reverse=True)
    return {request for _, request in decoding[num_running:]}
