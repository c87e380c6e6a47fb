"""`Step`: inputs of model and sampler for one step, built from a scheduler plan as flat arrays.

plan       a: 5 tokens from 0    b: 1 from 12    c: 1 from 7
token_ids  [ a a a a a b c ]         positions  [ 0 1 2 3 4 12 7 ]
cu_seqlens [ 0 5 6 7 ]               seq_lens   [ 5 13 8 ]
kv_slots        where in the cache each token's keys and values are written
logits_indices  tokens whose logits are computed: the last ones of a, b and c

Whole-array operations build all of it, except for properties that few requests have.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..requests.draws import uniform
from ..requests.request import Request

Array = TypeVar("Array")
"""np.ndarray on the host, Tensor on the device."""
MAX_UNSORTED_SEQS = 64
"""Above this number, requests are sorted by length, longest first: short ones then fill the gaps at
the end of decode attention, which takes 2 to 13 % less time on an H200."""
_UNLIMITED = 2**31 - 1
"""Larger than any vocabulary, and small enough for every integer type used here."""


class BatchParams:
    """Sampling parameters of the running requests, as arrays indexed by batch row.

    A request gets a row when it is admitted, and its parameters are written here once. A step then
    indexes whole arrays, so its Python cost does not grow with the batch.
    """

    def __init__(self, num_rows: int):
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.has_filters = np.zeros(num_rows, dtype=bool)
        self.repetition_penalty = np.ones(num_rows, dtype=np.float32)
        self.presence_penalty = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_rows, dtype=np.float32)
        self.has_penalties = np.zeros(num_rows, dtype=bool)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        """Alternatives reported beside each token's log-probability; -1: report nothing."""
        self.reports_processed = np.zeros(num_rows, dtype=bool)
        """Whether log-probabilities are those of the distribution that is sampled from."""
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.has_logit_edits = np.zeros(num_rows, dtype=bool)
        """Whether single logits are changed: a bias, or stop tokens before `min_tokens`."""

    def admit(self, request: Request) -> None:
        """Write the parameters of a request into its row."""
        row, p = request.row, request.params
        self.seed[row] = request.seed
        self.temperature[row] = 0 if p.is_greedy else p.temperature
        self.top_k[row] = min(p.top_k, _UNLIMITED)
        self.top_p[row], self.min_p[row] = p.top_p, p.min_p
        self.has_filters[row] = p.has_filters
        self.repetition_penalty[row] = p.repetition_penalty
        self.presence_penalty[row] = p.presence_penalty
        self.frequency_penalty[row] = p.frequency_penalty
        self.has_penalties[row] = p.has_penalties
        self.num_logprobs[row] = -1 if p.logprobs is None else min(p.logprobs, _UNLIMITED)
        self.reports_processed[row] = p.logprobs_mode == "processed"
        self.prompt_len[row] = request.prompt_len
        may_ban_stops = p.min_tokens > 0 and bool(request.stop_token_ids)
        self.has_logit_edits[row] = bool(p.logit_bias) or may_ban_stops


class LogitEdits(NamedTuple, Generic[Array]):
    """Values to add to single logits: biases, and minus infinity for banned tokens."""

    rows: Array
    tokens: Array
    values: Array


class Penalties(NamedTuple, Generic[Array]):
    """Rows with a repetition, presence or frequency penalty."""

    rows: Array
    batch_rows: Array
    """Their rows in the history of tokens."""
    prompt_lengths: Array
    lengths: Array
    repetition: Array
    presence: Array
    frequency: Array


class Filters(NamedTuple, Generic[Array]):
    """Rows with top-k, top-p or min-p."""

    rows: Array
    top_k: Array
    top_p: Array
    min_p: Array


class SamplingInputs(NamedTuple, Generic[Array]):
    """How to choose the tokens of S rows of logits; a field is None if no row uses it."""

    edits: LogitEdits[Array] | None = None
    penalties: Penalties[Array] | None = None
    temperature: Array | None = None
    """[S]; rows with 0 are greedy. None: all rows are."""
    uniform: Array | None = None
    """float64 [S]: random numbers in [0, 1)."""
    filters: Filters[Array] | None = None
    processed_rows: Array | None = None
    """Rows whose log-probabilities are those of the distribution that is sampled from."""

    @property
    def argmax_only(self) -> bool:
        """Whether every row takes the most likely token of unchanged logits."""
        return self.temperature is None and self.edits is None and self.penalties is None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step on the host: T tokens of N requests, S tokens to sample, R rows of logits.

    The first S rows of logits are sampled from, the others are scored.
    """

    requests: list[Request]
    token_ids: np.ndarray
    """int64 [T]; -1 - row where the token is still on the device."""
    positions: np.ndarray
    """int64 [T]."""
    cu_seqlens: np.ndarray
    """int32 [N+1]."""
    seq_lens: np.ndarray
    """int32 [N]: keys of each sequence, this step's included."""
    page_table: np.ndarray
    """int32 [N, P]."""
    kv_slots: np.ndarray
    """int64 [T]."""
    max_query_len: int
    max_seq_len: int
    logits_indices: np.ndarray
    """int64 [R]: indices into the T tokens."""
    sampled_requests: list[Request]
    """Once, or for each token of its draft and the one before it."""
    sampled_rows: np.ndarray
    """int64 [S]: batch rows of the sampled requests."""
    sampled_positions: np.ndarray
    """int64 [S]: positions of the new tokens."""
    scored: list[tuple[Request, range]]
    """Requests with positions whose next token is scored, in the order of the logits."""
    score_targets: np.ndarray
    """int64 [R - S]: the tokens that are scored."""
    num_logprobs: int
    """Alternatives to report beside a token's log-probability; -1: no log-probabilities."""
    sampling: SamplingInputs[np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """Results of a step on the host; log-probability arrays have one entry per row of logits."""

    sampled_token_ids: np.ndarray
    """int64 [S]; negative where the logits were not finite."""
    logprob: np.ndarray | None = None
    is_greedy: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def build_step(
    requests: list[Request], page_table: np.ndarray, page_size: int, batch_params: BatchParams
) -> Step:
    """Lay out the scheduled tokens of the requests as one step."""
    count = len(requests)
    if count > MAX_UNSORTED_SEQS:
        requests = sorted(requests, key=attrgetter("num_computed"), reverse=True)
    # From lists, which are faster than generators.
    rows = np.fromiter([r.row for r in requests], np.int64, count)
    starts = np.fromiter([r.num_computed for r in requests], np.int64, count)
    query_lens = np.fromiter([r.num_scheduled for r in requests], np.int64, count)
    num_tokens = np.fromiter([r.num_tokens for r in requests], np.int64, count)
    ends = starts + query_lens
    cu_seqlens = np.zeros(count + 1, np.int64)
    np.cumsum(query_lens, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    owners = np.repeat(np.arange(count), query_lens)
    positions = np.arange(total) + np.repeat(starts - cu_seqlens[:-1], query_lens)
    token_rows = rows[owners]
    pages = page_table[token_rows, positions // page_size].astype(np.int64)
    samples = (positions >= num_tokens[owners] - 1).nonzero()[0]
    max_seq_len = int(ends.max())
    sampled_requests = [requests[index] for index in owners[samples].tolist()]
    scored, score_indices, score_targets, num_logprobs = _scored(requests, cu_seqlens)
    sampled_rows, sampled_positions = token_rows[samples], positions[samples] + 1
    num_logprobs = max(num_logprobs, int(batch_params.num_logprobs[sampled_rows].max(initial=-1)))
    return Step(
        requests=requests,
        token_ids=_token_ids(requests, token_rows, cu_seqlens),
        positions=positions,
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        page_table=page_table[rows, : -(-max_seq_len // page_size)],
        kv_slots=pages * page_size + positions % page_size,
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
        logits_indices=np.concatenate([samples, score_indices]),
        sampled_requests=sampled_requests,
        sampled_rows=sampled_rows,
        sampled_positions=sampled_positions,
        scored=scored,
        score_targets=score_targets,
        num_logprobs=num_logprobs,
        sampling=_sampling_inputs(sampled_requests, sampled_rows, sampled_positions, batch_params),
    )


def _token_ids(
    requests: list[Request], token_rows: np.ndarray, cu_seqlens: np.ndarray
) -> np.ndarray:
    """Token ids that the host knows; -1 - row for those still on the device."""
    ids = -1 - token_rows
    known = [  # requests without a token in flight
        index
        for index, r in enumerate(requests)
        if r.num_tokens == r.prompt_len + len(r.output_token_ids)
    ]
    num_ahead = len(ids) - len(requests)
    offsets = cu_seqlens[known].tolist()
    for index, offset in zip(known, offsets, strict=True):
        request = requests[index]
        start, count = request.num_computed, request.num_scheduled
        if count == 1 and start >= request.prompt_len:  # many at once, after a pause
            ids[offset] = request.output_token_ids[start - request.prompt_len]
            continue
        ids[offset : offset + count] = request.token_ids(start, start + count)
        num_ahead -= count - 1
    assert not num_ahead, "a request runs ahead of its tokens"
    return ids


def _scored(
    requests: list[Request], cu_seqlens: np.ndarray
) -> tuple[list[tuple[Request, range]], np.ndarray, np.ndarray, int]:
    """Scored positions, their indices into the tokens, target tokens, alternatives to report."""
    scored, indices, targets, num_logprobs = [], [], [], -1
    for i, request in enumerate(requests):
        if request.score_from is None:
            continue
        start = request.num_computed
        span = request.scored_positions(start, start + request.num_scheduled)
        if len(span):
            scored.append((request, span))
            indices.append(np.arange(span.start, span.stop) - start + cu_seqlens[i])
            targets.append(request.prompt_token_ids[span.start + 1 : span.stop + 1])
            num_logprobs = max(num_logprobs, request.params.prompt_logprobs or 0)
    empty = np.empty(0, np.int64)
    all_indices, all_targets = np.concatenate([empty, *indices]), np.concatenate([empty, *targets])
    return scored, all_indices, all_targets, num_logprobs


def _sampling_inputs(
    sampled: list[Request], rows: np.ndarray, positions: np.ndarray, p: BatchParams
) -> SamplingInputs[np.ndarray]:
    temperature, filters, penalties = p.temperature[rows], None, None
    is_random = bool(temperature.any())
    if len(indices := p.has_filters[rows].nonzero()[0]):
        at = rows[indices]
        filters = Filters(indices, p.top_k[at], p.top_p[at], p.min_p[at])
    if len(indices := p.has_penalties[rows].nonzero()[0]):
        at = rows[indices]
        weights = p.repetition_penalty[at], p.presence_penalty[at], p.frequency_penalty[at]
        penalties = Penalties(indices, at, p.prompt_len[at], positions[indices], *weights)
    processed = p.reports_processed[rows].nonzero()[0]
    return SamplingInputs(
        edits=_logit_edits(sampled, positions, p.has_logit_edits[rows].nonzero()[0]),
        penalties=penalties,
        temperature=temperature if is_random else None,
        uniform=uniform(p.seed[rows], positions) if is_random else None,
        filters=filters,
        processed_rows=processed if len(processed) else None,
    )


def _logit_edits(
    sampled: list[Request], positions: np.ndarray, indices: np.ndarray
) -> LogitEdits[np.ndarray] | None:
    """Changes of single logits: a bias, and no stop token before `min_tokens`."""
    entries: list[tuple[int, int, float]] = []
    for index in indices.tolist():
        request = sampled[index]
        params = request.params
        num_output = positions[index] - request.prompt_len
        banned = request.stop_token_ids if num_output < params.min_tokens else frozenset[int]()
        entries += [(index, token, -np.inf) for token in banned]
        entries += [(index, t, bias) for t, bias in params.logit_bias.items() if t not in banned]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return LogitEdits(np.array(rows), np.array(tokens), np.array(values, dtype=np.float32))
