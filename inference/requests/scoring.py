"""Turn scoring calls into requests, with windows for long texts; sum the scores of their tokens.

    context [ c c c c ] + continuation [ x y ]   ->   ids c c c c x y, scored from position 4

Continuations of one context are requests with a common prefix, so the prefix cache computes the
context once. Logits are computed only at positions whose next token is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from numbers import Integral
from typing import Any

import numpy as np

from .batch_encoding import split_batch
from .output_processor import RequestGroup
from .outputs import Score
from .request import Request
from .request_builder import RequestBuilder
from .sampling_params import SamplingParams
from .tokenizer_adapter import RequestError, TokenizerAdapter

ScoreJob = tuple[np.ndarray, int] | str
"""Token ids and the first position to score; or the reason why there is nothing to score."""


def flatten_pairs(
    tokenizer: TokenizerAdapter, contexts: Sequence[Any], continuations: Sequence[Any]
) -> tuple[list[ScoreJob], Callable[[list[Score]], list[Any]]]:
    """Flatten contexts and continuations to jobs; the second value regroups their scores."""
    contexts, continuations = check_pairs(contexts, continuations)
    tokenizer.check_batch(contexts)
    jobs: list[ScoreJob] = []
    counts: list[int | None] = []
    for context, value in zip(contexts, continuations, strict=True):
        is_list = _is_list_of_continuations(value)
        jobs += [_job(tokenizer, context, item) for item in (value if is_list else [value])]
        counts.append(len(value) if is_list else None)

    def regroup(scores: list[Score]) -> list[Any]:
        rest = iter(scores)
        return [next(rest) if n is None else [next(rest) for _ in range(n)] for n in counts]

    return jobs, regroup


def check_pairs(contexts: Any, continuations: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return lists of equal length: every context has a continuation, or a list of them."""
    contexts = split_batch("contexts", contexts)
    continuations = split_batch("continuations", continuations)
    _check_list("contexts", contexts)
    _check_list("continuations", continuations)
    if len(contexts) != len(continuations):
        raise ValueError(f"{len(contexts)} contexts, {len(continuations)} continuations")
    return contexts, continuations


def rolling_windows(
    tokenizer: TokenizerAdapter, texts: Sequence[Any], max_length: int | None, max_model_len: int
) -> tuple[list[ScoreJob], Callable[[list[Score]], list[Score]]]:
    """Split texts into windows that predict each token once; the second value sums their scores."""
    texts = split_batch("texts", texts)
    _check_list("texts", texts)
    length = max_model_len if max_length is None else max_length
    if isinstance(length, bool) or not isinstance(length, Integral) or length < 2:
        raise ValueError(
            f"max_length is {length!r}; it must be a whole number from 2, to predict one token"
        )
    jobs: list[ScoreJob] = []
    counts = []
    for text in texts:
        try:
            ids = _with_start_token(tokenizer, text)
            text_jobs: list[ScoreJob] = [*scoring_windows(ids, min(length, max_model_len))]
        except RequestError as error:
            text_jobs = [str(error)]
        jobs += text_jobs
        counts.append(len(text_jobs))

    def join(scores: list[Score]) -> list[Score]:
        rest = iter(scores)
        return [_sum_scores([next(rest) for _ in range(n)]) for n in counts]

    return jobs, join


def scoring_windows(ids: np.ndarray, length: int) -> list[tuple[np.ndarray, int]]:
    """Windows of at most `length` tokens, each starting with the last token of the previous one.

    Fewer than two tokens give no windows.

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


def scoring_requests(
    builder: RequestBuilder, jobs: Sequence[ScoreJob], expires: float, cache_tokens: int
) -> list[RequestGroup]:
    """One group per job; cache_tokens: tokens that the KV cache holds."""
    groups = []
    for job in jobs:
        group = RequestGroup(builder.new_id(), builder.tokenizer, streaming=False)
        groups.append(group)
        if isinstance(job, str):
            group.fail(job)
            continue
        ids, score_from = job
        try:
            max_len = builder.max_len(len(ids), 0, cache_tokens)
        except RequestError as error:
            group.fail(str(error))
            continue
        options = {"deadline": expires, "score_from": score_from}
        group.requests = [Request(builder.new_id(), ids, max_len, SamplingParams(), **options)]
    return groups


def longest_first(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    """Groups in the order to run them: long ones do not fill the last steps alone."""
    return sorted(groups, key=lambda group: -sum(r.prompt_len for r in group.requests))


def to_score(group: RequestGroup) -> Score:
    """Sum the log-probabilities of a finished job."""
    if group.error is not None or not group.requests:
        return Score(float("nan"), False, [], group.error)
    (request,) = group.requests
    assert request.score_from is not None
    positions = range(request.score_from, len(request.prompt_token_ids))
    entries = [request.scores[p] for p in positions if p in request.scores]
    if len(entries) < len(positions):
        return Score(float("nan"), False, [], f"not scored: {request.finish_reason}")
    logprobs = [entry[0] for entry in entries]
    return Score(sum(logprobs), all(entry[1] for entry in entries), logprobs)


def _sum_scores(scores: list[Score]) -> Score:
    error = next((s.error for s in scores if s.error), None)
    logprobs = [logprob for s in scores for logprob in s.token_logprobs]
    total = sum((s.logprob for s in scores), 0.0)
    return Score(total, all(s.is_greedy for s in scores), logprobs, error)


def _job(tokenizer: TokenizerAdapter, context: Any, continuation: Any) -> ScoreJob:
    try:
        if isinstance(context, str) and isinstance(continuation, str):
            return _encode_text_pair(tokenizer, context, continuation)
        ids = tokenizer.encode(context)
        return np.concatenate([ids, _encode_continuation(tokenizer, continuation)]), len(ids)
    except RequestError as error:
        return str(error)


def _encode_text_pair(tokenizer: TokenizerAdapter, context: str, continuation: str) -> ScoreJob:
    """Encode both together, so that the boundary is where the tokenizer would put it.

    A space at the end of the context belongs to the continuation's first token.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        start = np.array([_start_token(tokenizer)])
        return np.concatenate([start, _encode_continuation(tokenizer, continuation)]), 1
    ids = tokenizer.encode(stripped + continuation)
    context_ids = tokenizer.encode(stripped)
    if len(ids) <= len(context_ids):
        raise RequestError(_EMPTY)
    return ids, len(context_ids)


_EMPTY = "the continuation is empty; pass at least one token"


def _encode_continuation(tokenizer: TokenizerAdapter, continuation: Any) -> np.ndarray:
    ids = tokenizer.encode(continuation, add_special_tokens=False, allow_empty=True)
    if not len(ids):
        raise RequestError(_EMPTY)
    return ids


def _with_start_token(tokenizer: TokenizerAdapter, text: Any) -> np.ndarray:
    ids = tokenizer.encode(text, add_special_tokens=False, allow_empty=True)
    return np.concatenate([np.array([_start_token(tokenizer)]), ids])


def _start_token(tokenizer: TokenizerAdapter) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(tokenizer.tokenizer, name, None)
        if token is not None and token < tokenizer.vocab_size:
            return token
    first_eos = min(tokenizer.eos_token_ids, default=tokenizer.vocab_size)
    if first_eos < tokenizer.vocab_size:
        return first_eos
    raise ValueError("no beginning-of-text token is known to predict the first token from")


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sized):
        raise ValueError(f"{name} is one {type(value).__name__}; pass a list of {name}")


def _is_list_of_continuations(value: Any) -> bool:
    """Whether this is a list of continuations, maybe empty, rather than one of token ids."""
    if not isinstance(value, (list, tuple)):
        return False
    return not value or not isinstance(value[0], (int, np.integer))
