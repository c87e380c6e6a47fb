"""Hold short requests of known length back, so that steps stay equally large until all end.

    requests    all at once ▇▅▃▂▂▁▁▁▁▁      evened out ▃▃▃▃▃▃▃▃▃▃
    in a step               steps ──▶                  steps ──▶

The longest request takes a step per token, and every step reads all weights. If short requests
start with it, the first steps have very many rows and the last ones few. A step's time grows faster
with its rows the more it has, and few rows do not keep the memory busy: equal steps take less time
together. Nothing is gained where a token or a string may end a request: its length is unknown then,
and more requests at once are better.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..requests.request import Request

MIN_RUNNING = 128
"""Requests that are never held back: with fewer, steps hardly become shorter on an H200."""
ROW_STEP = 64
"""Steps of more requests are padded to a multiple of this."""
MIN_TURN = 4
"""Tokens after which requests of about the same length take turns."""


def requests_to_hold(running: Sequence[Request]) -> Collection[Request]:
    """Return requests that the next step can leave out without more steps for all.

    With R requests in a step, those with the most tokens left, all end with the longest if
    R times its tokens are no fewer than the tokens of all.
    """
    if len(running) <= MIN_RUNNING:
        return ()
    tokens_left, priority = [], running[0].priority
    for request in running:
        is_prefill = request.num_tokens - request.num_computed > 1
        if is_prefill or not request.length_is_known or request.priority != priority:
            return ()
        tokens_left.append(request.max_len - request.num_tokens)
    left = np.array(tokens_left)
    num_running = -(-int(left.sum()) // max(int(left.max()), 1))
    num_running = max(-(-num_running // ROW_STEP) * ROW_STEP, MIN_RUNNING)
    order = np.argsort(-(left // MIN_TURN), kind="stable")
    return {running[index] for index in order[num_running:].tolist()}
