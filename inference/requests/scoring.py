"""Log-likelihoods as requests: which tokens to run, which of them to score, and how to add up.

    context [ c c c c ] + continuation [ x y ]   ->   ids c c c c x y, scored from position 4

Continuations of one context become requests that begin alike, so the cache computes the context
once. Only rows whose next token is scored ever meet the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from .outputs import Score
from .request_group import RequestGroup
from .tokenization import TokenizerAdapter

ScoreJob = tuple[np.ndarray, int] | str
"""Token ids and the first position scored; or why there is nothing to score."""


def pairs(
    tongue: TokenizerAdapter, contexts: Sequence[Any], continuations: Sequence[Any]
) -> tuple[list[ScoreJob], Callable[[list[Score]], list[Any]]]:
    """Flatten contexts and continuations to jobs; the second value undoes that for scores."""
    check_pairs(contexts, continuations)
    jobs: list[ScoreJob] = []
    counts: list[int | None] = []
    for context, given in zip(contexts, continuations, strict=True):
        several = _several(given)
        jobs += [_job(tongue, context, one) for one in (given if several else [given])]
        counts.append(len(given) if several else None)

    def shape(scores: list[Score]) -> list[Any]:
        rest = iter(scores)
        return [next(rest) if n is None else [next(rest) for _ in range(n)] for n in counts]

    return jobs, shape


def check_pairs(contexts: Any, continuations: Any) -> None:
    """See that there is a continuation, or a list of them, for every context."""
    _check_list("contexts", contexts)
    _check_list("continuations", continuations)
    if len(contexts) != len(continuations):
        raise ValueError(f"{len(contexts)} contexts, {len(continuations)} continuations")


def rolling_windows(
    tongue: TokenizerAdapter, texts: Sequence[Any], length: int | None, longest: int
) -> tuple[list[ScoreJob], Callable[[list[Score]], list[Score]]]:
    """Cut texts to windows that predict every token once; the second value joins their scores."""
    _check_list("texts", texts)
    length = longest if length is None else length
    if isinstance(length, bool) or not isinstance(length, Integral) or length < 2:
        raise ValueError(
            f"max_length is {length!r}; it must be a whole number from 2, to predict one token"
        )
    jobs: list[ScoreJob] = []
    counts = []
    for text in texts:
        try:
            windows: list[ScoreJob] = [
                *scoring_windows(_with_start(tongue, text), min(length, longest))
            ]
        except ValueError as error:
            windows = [str(error)]
        jobs += windows
        counts.append(len(windows))

    def join(scores: list[Score]) -> list[Score]:
        rest = iter(scores)
        return [_joined([next(rest) for _ in range(n)]) for n in counts]

    return jobs, join


def scoring_windows(ids: np.ndarray, length: int) -> list[tuple[np.ndarray, int]]:
    """Windows of at most `length` tokens, each opening with the last token of the one before.

    What has nothing to predict has no windows.

    >>> [(w.tolist(), first) for w, first in scoring_windows(np.arange(6), 3)]
    [([0, 1, 2], 1), ([2, 3, 4], 1), ([3, 4, 5], 2)]
    """
    windows = [(ids[:length], 1)] if len(ids) > 1 else []
    done = min(length, len(ids))
    while done < len(ids):
        end = min(done + length - 1, len(ids))
        start = max(end - length, 0)
        windows.append((ids[start:end], done - start))
        done = end
    return windows


def scored(group: RequestGroup) -> Score:
    """Add up what a finished job found."""
    if group.error is not None or not group.requests:
        return Score(float("nan"), False, [], group.error)
    (request,) = group.requests
    assert request.score_from is not None
    wanted = range(request.score_from, len(request.prompt))
    found = [request.scores[p] for p in wanted if p in request.scores]
    if len(found) < len(wanted):
        return Score(float("nan"), False, [], f"not scored: {request.finish_reason}")
    logprobs = [f[0] for f in found]
    return Score(sum(logprobs), all(f[1] for f in found), logprobs)


def _joined(parts: list[Score]) -> Score:
    error = next((p.error for p in parts if p.error), None)
    logprobs = [x for part in parts for x in part.token_logprobs]
    total = sum((p.logprob for p in parts), 0.0)
    return Score(total, all(p.is_greedy for p in parts), logprobs, error)


def _job(tongue: TokenizerAdapter, context: Any, continuation: Any) -> ScoreJob:
    try:
        if isinstance(context, str) and isinstance(continuation, str):
            return _split_text(tongue, context, continuation)
        before = tongue.encode(context)
        return np.concatenate([before, _continuation(tongue, continuation)]), len(before)
    except ValueError as error:
        return str(error)


def _split_text(tongue: TokenizerAdapter, context: str, continuation: str) -> ScoreJob:
    """Encode both together, so that the border is where the tokenizer would put it.

    A space at the end of the context belongs to the continuation's first token.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        start = np.array([_start_token(tongue)])
        return np.concatenate([start, _continuation(tongue, continuation)]), 1
    whole = tongue.encode(kept + continuation)
    before = tongue.encode(kept)
    if len(whole) <= len(before):
        raise ValueError(_EMPTY)
    return whole, len(before)


_EMPTY = "the continuation is empty; give at least one token"


def _continuation(tongue: TokenizerAdapter, given: Any) -> np.ndarray:
    ids = tongue.encode(given, special=False, empty=True)
    if not len(ids):
        raise ValueError(_EMPTY)
    return ids


def _with_start(tongue: TokenizerAdapter, text: Any) -> np.ndarray:
    ids = tongue.encode(text, special=False, empty=True)
    return np.concatenate([np.array([_start_token(tongue)]), ids])


def _start_token(tongue: TokenizerAdapter) -> int:
    tokenizer = tongue.tokenizer
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None and token < tongue.vocabulary:
            return token
    if (first := min(tongue.ends, default=tongue.vocabulary)) < tongue.vocabulary:
        return first
    raise ValueError("no beginning-of-text token is known to predict the first token from")


def _check_list(name: str, given: Any) -> None:
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise ValueError(f"{name} is one {type(given).__name__}; give a list of {name}")


def _several(continuation: Any) -> bool:
    """Whether this is a list of continuations, maybe of none, and not one of them."""
    if not isinstance(continuation, (list, tuple)):
        return False
    return not continuation or not isinstance(continuation[0], (int, np.integer))
