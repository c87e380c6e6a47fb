"""Speculative decoding from n-grams or earlier completions: draft tokens, verify them in one step.

    runs      … t │ d1 d2 d3      the newest token, and a draft of those after it
    samples       │ s0 s1 s2 s3   s0 is new; s1 is if s0 = d1; s2 is if s1 = d2, too; …

Every position is sampled with the request's own random number for it, from logits of tokens that it
has if the position counts. So completions are those without speculation, whatever the draft. KV
slots of rejected tokens are written again by the next step: `num_computed` never counts them, and
only prompts are registered as prefixes.

A draft follows the newest token, so a step with drafts is planned after the one before is read, and
read before the next one is planned. Without drafts two steps overlap as always; every few steps the
tokens that came show what drafts would have been worth. Drafts are used while expected tokens
per second, from their hit rate and the measured time of steps, exceed those of plain steps.

Expectations may be wrong, and looking takes time, too. So there is a credit of a few plain steps,
which grows by one percent of the time: what steps with drafts, and steps after a look, take longer
than plain ones is paid from it. Without credit, drafts are not considered, and a run of steps with
drafts continues only while it gains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..metrics.stats import Stats
from ..requests.draws import prompt_hash
from ..requests.request import Request
from .scheduler import Scheduler, SchedulerOutput
from .step import Step

DraftSource = Literal["ngram", "history"]
MAX_LOGIT_ROWS = 1024
_LOGIT_ROWS = (16, 64, 128, 256, 512, MAX_LOGIT_ROWS)
"""Rows of logits of steps with drafts: few sizes, those of captured steps."""
_MAX_DRAFT = 63
_NGRAM = 3
"""Newest tokens that are looked up in the text to draft from."""
_MIN_GAIN = 1.03
"""Drafts are used if they are expected to be this many times as fast."""
_FIRST_GUESS = 0.6
"""Hit rate of drafts before any was verified."""
_MAX_HIT_RATE = 0.98
_MEMORY = 0.9
"""Weight of a request's earlier hits, at each update."""
_SEARCH_INTERVAL = 8
"""Plain steps until a draft is searched again where there was none."""
_LOOK_INTERVAL, _MAX_LOOK_INTERVAL = 16, 64
"""Plain steps until the hit rate is looked at again; doubled while drafts do not pay."""
_MIN_SAMPLES = 3
_PLAIN_INTERVAL = 512
"""Steps with drafts until plain steps are timed again."""
_FORGET_INTERVAL = 2048
"""Plain steps until steps with drafts, which were too slow, may be timed again."""
_CREDIT, _CREDIT_RATE = 4.0, 0.01
"""Plain steps that drafts may cost at once, and in the long run for each step."""
_SLOWEST = 8.0
"""Plain steps that one step counts for at most: others are pauses, which no draft has caused."""
_NUM_AFFECTED = 3
"""Steps that a look or drafts may delay: the next, and those that do not overlap because of it."""
_HISTORY_TOKENS = 1 << 24
_SEEDS_PER_PROMPT = 64


class CompletionHistory:
    """The newest completions of each prompt, to draft from when the prompt comes again.

    >>> history = CompletionHistory(max_tokens=4)
    >>> history.add(prompt=1, seed=0, tokens=[5, 6]); history.add(prompt=2, seed=0, tokens=[7, 8])
    >>> history.find(prompt=1, seed=9), history.add(prompt=3, seed=0, tokens=[9])
    (array([5, 6], dtype=int32), None)
    >>> history.find(prompt=1, seed=0) is None
    True
    """

    def __init__(self, max_tokens: int = _HISTORY_TOKENS):
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_prompt: OrderedDict[int, dict[int, np.ndarray]] = OrderedDict()
        """By hash of the prompt, then by seed; the oldest first in both."""

    def find(self, prompt: int, seed: int) -> np.ndarray | None:
        """Return the completion drawn with this seed, else the newest of the prompt."""
        by_seed = self._by_prompt.get(prompt)
        if by_seed is None:
            return None
        return by_seed[seed] if seed in by_seed else next(reversed(by_seed.values()))

    def add(self, prompt: int, seed: int, tokens: Sequence[int]) -> None:
        """Keep a completion; drop the oldest prompts if there are too many tokens."""
        by_seed = self._by_prompt.pop(prompt, {})
        self._num_tokens += len(tokens) - len(by_seed.pop(seed, ()))
        self._by_prompt[prompt] = by_seed
        by_seed[seed] = np.array(tokens, dtype=np.int32)
        if len(by_seed) > _SEEDS_PER_PROMPT:
            self._num_tokens -= len(by_seed.pop(next(iter(by_seed))))
        while self._num_tokens > self._max_tokens:
            _, dropped = self._by_prompt.popitem(last=False)
            self._num_tokens -= sum(map(len, dropped.values()))


class DraftText:
    """A text that a request may continue as, and where the request is in it."""

    def __init__(self, request: Request, earlier: np.ndarray | None):
        """Draft from an earlier completion; None: from the request's own tokens."""
        self._is_own = earlier is None
        self._tokens = request.prompt_token_ids.astype(np.int32) if earlier is None else earlier
        self._size = len(self._tokens)
        self._next: int | None = self._find() if self._is_own else 0
        """Index of the token that is expected next."""
        self._num_seen = 0
        self.hits = self.checked = 0.0

    def advance(self, output: list[int]) -> tuple[int, int]:
        """Follow the request's new tokens; return how many were foreseen, and how many checked."""
        new = output[self._num_seen :]
        if not new:
            return 0, 0
        hits = checked = 0
        expected = [] if self._next is None else self.draft(len(new))
        while hits < len(expected) and expected[hits] == new[hits]:
            hits += 1
        checked = hits + (hits < len(expected))
        self.hits, self.checked = _MEMORY * self.hits + hits, _MEMORY * self.checked + checked
        self._num_seen = len(output)
        if self._is_own:
            self._append(new)
        if self._next is not None:
            self._next += len(new)
        if self._next is None or hits < len(new):
            found = self._find(output[-_NGRAM:])
            if found is not None or self._is_own:  # else one token may have been replaced
                self._next = found
        return hits, checked

    def draft(self, length: int) -> list[int]:
        """Return the tokens expected next, at most `length`."""
        if self._next is None:
            return []
        return self._tokens[self._next : min(self._next + length, self._size)].tolist()

    def num_left(self) -> int:
        """Return the length of the longest draft."""
        return 0 if self._next is None else max(self._size - self._next, 0)

    def _append(self, new: list[int]) -> None:
        size = self._size + len(new)
        if size > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * size)
        self._tokens[self._size : size] = new
        self._size = size

    def _find(self, newest: Sequence[int] = ()) -> int | None:
        """Return the index after the closest earlier occurrence of the newest tokens."""
        tokens = self._tokens[: self._size]
        end = self._size - 1 if self._is_own else self._size
        newest = tokens[-_NGRAM:].tolist() if self._is_own else newest
        if len(newest) < _NGRAM or end < _NGRAM:
            return None
        last = (tokens[_NGRAM - 1 : end] == newest[-1]).nonzero()[0]  # starts of candidates
        for offset in range(_NGRAM - 1):
            last = last[tokens[last + offset] == newest[offset]]
        if not len(last):
            return None
        return int(last[np.abs(last + _NGRAM - self._expected_index()).argmin()]) + _NGRAM

    def _expected_index(self) -> int:
        return self._size if self._is_own else self._num_seen


class StepTimes:
    """Median seconds from the end of a step to that of the next one, by kind and size of step."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._drafted: dict[int, deque[float]] = {}
        self._last: tuple[bool, int, float] | None = None
        self._since_forgotten = 0

    def record(self, num_requests: int, num_rows: int, now: float) -> float | None:
        """Note the end of a step in which each request decodes.

        Return the seconds since the end of the step before; None: that was one of another kind.
        """
        has_drafts = num_rows > num_requests
        size = _bucket(num_rows) if has_drafts else _power(num_requests)
        last, self._last = self._last, (has_drafts, size, now)
        if last is not None and last[:2] == self._last[:2]:
            times = self._drafted if has_drafts else self._plain
            times.setdefault(size, deque(maxlen=9)).append(now - last[2])
        self._since_forgotten += not has_drafts
        if self._since_forgotten > _FORGET_INTERVAL:
            self._since_forgotten = 0
            self._drafted.clear()
        return None if last is None else now - last[2]

    def pause(self) -> None:
        """Note a step of another kind."""
        self._last = None

    def plain(self, num_requests: int) -> float | None:
        """Return the time of a plain step, or of one half or twice as large; None: unknown."""
        size = _power(num_requests)
        for near in (size, 2 * size, size // 2):
            if (seconds := _median(self._plain.get(near))) is not None:
                return seconds
        return None

    def drafted(self, num_requests: int, plain: float) -> list[tuple[int, float]]:
        """Return sizes of steps with drafts, in rows of logits, with their times.

        The last one is a guess, to be tried next, on the line through the two before it.
        """
        sizes = [size for size in _LOGIT_ROWS if size > num_requests]
        points = [(num_requests, plain)]
        for size in sizes:
            if (seconds := _median(self._drafted.get(size))) is None:
                slope = 0.1 * plain / size  # before any is known
                if len(points) > 1:
                    (rows, before), (last_rows, last) = points[-2:]
                    slope = max(0.0, last - before) / (last_rows - rows)
                    if len(points) == 2:  # a step with drafts waits for the host, a plain one not
                        slope /= 4
                guess = points[-1][1] + slope * (size - points[-1][0])
                return [*points[1:], (size, guess)]
            points.append((size, seconds))
        return points[1:]


class Speculation:
    """Drafts for the requests of a step loop, and the decision whether to use them."""

    def __init__(self, source: DraftSource, stats: Stats):
        self._history = CompletionHistory() if source == "history" else None
        self._stats = stats
        self._times = StepTimes()
        self._texts: dict[int, DraftText] = {}
        """By id, of the requests that decode."""
        self._hits, self._checked = 4 * _FIRST_GUESS, 4.0
        """Of all requests, the older the less."""
        self._wait = 0
        """Steps until drafts are considered again."""
        self._look_interval = _LOOK_INTERVAL
        self._newest_without: int | None = None
        """Id of the newest request when none had a draft; None: some have one."""
        self._max_rows = MAX_LOGIT_ROWS
        self._num_drafted_steps = 0
        self._credit = _CREDIT
        """In plain steps."""
        self._is_starting = False
        """Whether the next step starts a run of steps with drafts: those in flight were read."""
        self._run_length, self._run_balance = 0, 0.0
        """Steps with drafts since a plain one, and what all but the first saved, in plain steps."""
        self._num_affected = 0
        """Steps to come that are paid from the credit."""
        self._captured = 0.0
        """Seconds of graph captures that are known."""

    def is_due(self, running: list[Request]) -> bool:
        """Return whether to read the steps in flight, because drafts would pay."""
        if not self._is_time(running):
            return False
        decoding = [r for r in running if r.output_token_ids]
        self._is_starting = bool(decoding) and any(self._draft_lengths(decoding, self._max_rows))
        return self._is_starting

    def add_drafts(
        self, plan: SchedulerOutput, scheduler: Scheduler, max_tokens: int | None
    ) -> bool:
        """Extend the decodes of a plan by drafts if that pays; return whether it has any.

        No step may be in flight. max_tokens: a lower limit than the scheduler's own.
        """
        is_time, self._is_starting = self._is_time(plan.requests), False
        decoding = [r for r in plan.requests if r.output_token_ids and r.num_remaining == 1]
        if not (is_time and decoding):
            return False
        limit = scheduler.max_num_batched_tokens
        tokens_left = min(limit, max_tokens or limit) - sum(r.num_scheduled for r in plan.requests)
        max_rows = min(self._max_rows, len(decoding) + max(tokens_left, 0))
        num_drafted = 0
        for request, length in zip(decoding, self._draft_lengths(decoding, max_rows), strict=True):
            if length and (length := _add_pages(request, length, scheduler)):
                request.draft = self._texts[request.id].draft(length)
                request.num_scheduled += length
                num_drafted += length
        self._stats.drafted_tokens += num_drafted
        self._num_drafted_steps += num_drafted > 0
        if self._num_drafted_steps >= _PLAIN_INTERVAL:
            self._num_drafted_steps, self._wait = 0, 2 + _MIN_SAMPLES
        return num_drafted > 0

    def discard(self, plan: SchedulerOutput) -> bool:
        """Drop the drafts of a step that did not fit into memory; False if it had none."""
        drafted = [request for request in plan.requests if request.draft]
        for request in drafted:
            request.draft = []
        if drafted:
            self._max_rows //= 2
        return bool(drafted)

    def verify(self, step: Step, sampled: list[int], now: float) -> Sequence[int]:
        """Accept the drafts that were sampled; return the rows of logits whose tokens count."""
        num_rows, num_requests = len(sampled), len(step.requests)
        seconds = None
        if len(step.token_ids) == num_rows:
            seconds = self._times.record(num_requests, num_rows, now)
        else:
            self._times.pause()
        if step.max_query_len == 1 or not any(request.draft for request in step.requests):
            self._run_length, self._run_balance = 0, 0.0
            self._account(seconds, num_requests, num_rows if num_requests == num_rows else 0)
            return range(num_rows)
        rows, inputs = [], step.token_ids[step.logits_indices[:num_rows]].tolist()
        before, counts = None, False
        for row, request in enumerate(step.sampled_requests):
            if request is not before:
                counts, request.draft = True, []
            elif counts := counts and sampled[row - 1] == inputs[row] and sampled[row] >= 0:
                request.num_computed += 1
                request.num_tokens += 1
                self._stats.accepted_tokens += 1
            before = request
            if counts:
                rows.append(row)
        self._num_affected = _NUM_AFFECTED
        self._run_length += 1
        self._account(seconds, num_requests, len(rows))
        return rows

    def _account(self, seconds: float | None, num_requests: int, num_tokens: int) -> None:
        """Add a decode step to the credit, and what it saved if a look or drafts may matter to it.

        seconds: since the end of the step before, if that was a decode step, too.
        """
        captured, self._captured = self._captured, self._stats.capture_seconds
        plain = self._times.plain(num_requests)
        if seconds is None or plain is None or not num_tokens:
            return
        # Graphs are captured once, so their time is not a cost of drafts.
        steps = min((seconds - max(0.0, self._captured - captured)) / plain, _SLOWEST)
        saved = 0.0
        if self._num_affected:
            self._num_affected -= 1
            saved = num_tokens / num_requests - steps
        self._credit = min(self._credit + _CREDIT_RATE * steps + saved, _CREDIT)
        self._run_balance += saved if self._run_length > 1 else 0.0

    def on_admitted(self) -> None:
        """Note that requests were admitted: the loop may have been idle before."""
        self._times.pause()

    def record(self, request: Request) -> None:
        """Keep the completion of a request that ended."""
        if self._history is not None and request.output_token_ids:
            prompt = prompt_hash(request.prompt_token_ids)
            self._history.add(prompt, request.seed, request.output_token_ids)

    def _is_time(self, requests: list[Request]) -> bool:
        """Return whether to consider drafts at this step."""
        self._wait -= 1
        if self._newest_without is not None and _newest(requests) > self._newest_without:
            self._wait = 0
        # The first step of a run pays for the switch from plain ones: the second one tells.
        gains = self._is_starting or self._run_length == 1 or self._run_balance > 0
        return self._wait <= 0 and (gains or self._credit > 0)

    def _draft_lengths(self, decoding: list[Request], max_rows: int) -> list[int]:
        """Return the number of draft tokens of each request that decodes; all 0: no drafts."""
        none, num_requests = [0] * len(decoding), len(decoding)
        texts = self._follow(decoding)
        self._wait, self._newest_without = self._look_interval, None
        self._num_affected = _NUM_AFFECTED
        plain = self._times.plain(num_requests)
        if plain is None:
            self._wait = 1 + _MIN_SAMPLES
            return none
        longest = min(_MAX_DRAFT, 4 * max_rows // num_requests)
        chances = self._chances(decoding, texts, longest)
        order = np.argsort(-chances, axis=None, kind="stable")
        order = order[: np.count_nonzero(chances)]
        if not len(order):
            self._wait, self._newest_without = _SEARCH_INTERVAL, _newest(decoding)
            return none
        expected = np.cumsum(chances.ravel()[order])
        best, num_drafted = _MIN_GAIN * num_requests / plain, 0
        for num_rows, seconds in self._times.drafted(num_requests, plain):
            count = min(min(num_rows, max_rows) - num_requests, len(order))
            if count > 0:
                speed = (num_requests + expected[count - 1]) / seconds
                if speed > best:
                    best, num_drafted = speed, count
        if not num_drafted:
            self._look_interval = min(2 * self._look_interval, _MAX_LOOK_INTERVAL)
            return none
        self._wait, self._look_interval = 0, _LOOK_INTERVAL
        owners = order[:num_drafted] // chances.shape[1]
        return np.bincount(owners, minlength=num_requests).tolist()

    def _follow(self, decoding: list[Request]) -> list[DraftText | None]:
        """Return the texts of requests, moved to their newest tokens."""
        texts, known = {}, self._texts
        for request in decoding:
            text = known.get(request.id) or self._open(request)
            if text is not None:
                hits, checked = text.advance(request.output_token_ids)
                self._hits, self._checked = self._hits + hits, self._checked + checked
                texts[request.id] = text
        if self._checked > 1000:
            self._hits, self._checked = self._hits / 2, self._checked / 2
        self._texts = texts
        return [texts.get(request.id) for request in decoding]

    def _open(self, request: Request) -> DraftText | None:
        if self._history is None:
            return DraftText(request, None)
        earlier = self._history.find(prompt_hash(request.prompt_token_ids), request.seed)
        return None if earlier is None else DraftText(request, earlier)

    def _chances(
        self, decoding: list[Request], texts: list[DraftText | None], longest: int
    ) -> np.ndarray:
        """Return the chance that draft token j of each request is accepted: its hit rate ** j."""
        usual = self._hits / self._checked
        rates, lengths = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
        for index, (request, text) in enumerate(zip(decoding, texts, strict=True)):
            if text is not None:
                rates[index] = (text.hits + 2 * usual) / (text.checked + 2)
                # The last token of a sequence is never run.
                lengths[index] = min(text.num_left(), request.max_len - 1 - request.num_tokens)
        count = np.arange(1, max(int(lengths.max()), 1) + 1)[:longest]
        chances = np.minimum(rates, _MAX_HIT_RATE)[:, None] ** count
        return np.where(count <= lengths[:, None], chances, 0.0)


def _newest(requests: list[Request]) -> int:
    """Return the id of the newest request that decodes; -1: none does."""
    return max((request.id for request in requests if request.output_token_ids), default=-1)


def _median(times: Sequence[float] | None) -> float | None:
    """Return the median; None if there are too few, of which one may include a capture."""
    if times is None or len(times) < _MIN_SAMPLES:
        return None
    return sorted(times)[len(times) // 2]


def _add_pages(request: Request, length: int, scheduler: Scheduler) -> int:
    """Give a request pages for a draft, but none that others may need; return its length then."""
    pages = scheduler.pages
    missing = -(-(request.num_tokens + length) // pages.page_size) - request.num_pages
    if 0 < missing <= pages.available - len(scheduler.running):
        scheduler.append_pages(request, missing)
    return min(length, request.num_pages * pages.page_size - request.num_tokens)


def _bucket(num_rows: int) -> int:
    return _LOGIT_ROWS[min(bisect_left(_LOGIT_ROWS, num_rows), len(_LOGIT_ROWS) - 1)]


def _power(count: int) -> int:
    """Return the power of two that a batch is rounded up to.

    >>> [_power(count) for count in (1, 3, 64, 65)]
    [1, 4, 64, 128]
    """
    return 1 << (count - 1).bit_length()
