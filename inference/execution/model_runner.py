"""Steps on the device: upload the arrays, run the model, choose tokens, start their way back.

Step (host) ─one copy─▶ ids, positions, pages ─▶ model ─▶ logits of wanted rows ─▶ tokens
                          ▲                                                         │
                          └────────────── newest token of each slot ◀───────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention import PagedCache, Pages, Varlen, check_every_layer, forward_context
from ...attention.backends import NotCapturable, forced_paged_backend
from ...attention.paging import PageCopy
from ..live_model.adapters import AdapterState
from ..metrics.stats import Stats
from ..scheduling.loop import OutOfMemory
from ..scheduling.row_params import RowParams
from ..scheduling.step import Step, StepOutput
from .cuda_graphs import DecodeGraphs, decodes
from .memory_budget import is_out_of_memory
from .sampler import Filters, LogitEdits, Penalties, SamplingInputs, gather_logprobs, sample
from .transfer import HostDeviceCopy

try:
    from ...kernels.tokens import resolve
except ImportError:  # no Triton on this machine
    resolve = None

log = logging.getLogger("nopad.inference")


class ModelRunner:
    """Run steps of a model whose keys and values live in a paged cache."""

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        columns: RowParams,
        stats: Stats,
        device: torch.device,
        room_for_graphs: int,
    ):
        self.lookahead = 1 if device.type == "cuda" else 0
        self.cache = cache
        self._model = model
        self._columns = columns
        self._device = device
        self._staging = HostDeviceCopy(device)
        # One entry more than slots: what padding rows of a graph yield goes there.
        self._newest = torch.zeros(len(columns.seed) + 1, dtype=torch.int64, device=device)
        self._history = self._newest.new_zeros(len(self._newest), 0)
        self._proven = False
        self._stats = stats
        self._room = room_for_graphs
        self._graphs = DecodeGraphs(cache, self._newest, self._room) if self._room else None
        self.may_capture = True
        """Whether forwards are now such that a graph may hold them, and may be replayed."""
        self.adapters: AdapterState = []
        """Which adapters are on now; graphs hold those that were on when they were captured."""
        self._captured_with: AdapterState = []
        self._refused: set[str | None] = set()
        """Attention backends, as asked for by name, whose calls cannot be captured."""

    def copy_pages(self, copies: list[PageCopy]) -> None:
        """Copy pages before the next step."""
        self.cache.copy_page([c.source for c in copies], [c.target for c in copies])

    def launch(self, step: Step) -> Callable[[], StepOutput]:
        """Start a step; the result is read by calling what is returned."""
        try:
            return self._launch(step)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(str(error)) from None

    def _launch(self, step: Step) -> Callable[[], StepOutput]:
        replayed = self._replay(step)
        if replayed is not None:
            assert self._graphs is not None
            logits, tokens, padded = replayed
            self._stats.record_graph_step(padded, len(self._graphs))
            if not step.sampling.argmax_only:
                tokens = self._sample(step, logits)
        else:
            logits = self._forward(step)
            tokens = self._sample(step, logits[: len(step.sampled_requests)])
        outputs = [tokens]
        if step.num_logprobs >= 0:
            (targets,) = self._staging.put([step.score_targets])
            found = gather_logprobs(logits, torch.cat([tokens, targets]), step.num_logprobs)
            outputs += [found.logprob, found.greedy, found.top_tokens, found.top_logprobs]
        read = self._staging.fetch(outputs)
        return lambda: StepOutput(*read())

    def _replay(self, step: Step) -> tuple[Tensor, Tensor, int] | None:
        """Run a step as a graph, if graphs are made and one serves it."""
        if self._graphs is None or not self.may_capture or not decodes(step):
            return None
        if self._captured_with != self.adapters:
            self.forget_graphs()
        self._captured_with = self.adapters  # the same object is compared at once, next time
        if (by := forced_paged_backend()) in self._refused or not self._graphs.serves(step):
            return None
        began, captured = perf_counter(), len(self._graphs)
        try:
            replayed = self._graphs.run(step, self.forward)
            if len(self._graphs) > captured:
                self._stats.capture_seconds += perf_counter() - began
            return replayed
        except NotCapturable as reason:
            self._refused.add(by)
            log.warning("decode steps run without graphs: %s", reason)
            return None

    def forget_graphs(self) -> None:
        """Drop captured graphs: weights have moved, or other adapters are on."""
        if self._graphs is not None:
            self._graphs = DecodeGraphs(self.cache, self._newest, self._room)

    def _forward(self, step: Step) -> Tensor:
        """Logits [R, V] of the wanted rows."""
        ids, positions, cu_seqlens, lengths, table, slots, rows = self._staging.put(
            [
                step.token_ids,
                step.positions,
                step.cu_seqlens,
                step.seq_lens,
                step.page_table,
                step.kv_slots,
                step.logits_indices,
            ]
        )
        pages = Pages(self.cache, table, lengths, slots, step.max_seq_len)
        varlen = Varlen(cu_seqlens, step.max_query_len, pages)
        return self.forward(ids, positions, varlen, rows)

    def forward(self, ids: Tensor, positions: Tensor, varlen: Varlen, rows: Tensor | int) -> Tensor:
        """Run the model on flat tokens; an id below zero names the slot of the token."""
        ids = _resolved(ids, self._newest)
        if not self._proven:
            with check_every_layer(self._model):
                logits = self._call(ids, positions, varlen, rows)
            self._proven = True
            return logits
        return self._call(ids, positions, varlen, rows)

    def _call(self, ids: Tensor, positions: Tensor, varlen: Varlen, rows: Tensor | int) -> Tensor:
        with forward_context(varlen):
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
                varlen=varlen,
            )
        return output.logits[0]

    def _sample(self, step: Step, logits: Tensor) -> Tensor:
        """Choose the tokens and keep them for the next step."""
        slots, positions = self._staging.put([step.sampled_rows, step.sampled_positions])
        tokens = sample(logits, self._choice(step))
        kept = tokens.clamp(min=0)
        self._newest.index_copy_(0, slots, kept)
        if self._history.numel():
            within = positions.clamp(max=self._history.shape[1] - 1)
            self._history.index_put_((slots, within), kept)
        return tokens

    def _choice(self, step: Step) -> SamplingInputs:
        """The sampler's inputs, on the device."""
        c = step.sampling
        if c.argmax_only:
            return SamplingInputs()
        temperature = uniform = None
        if c.temperature is not None and c.uniform is not None:
            temperature, uniform = self._staging.put([c.temperature, c.uniform])
        edits = None if c.edits is None else LogitEdits(*self._staging.put(list(c.edits)))
        filters = penalties = None
        if c.filter_indices is not None:
            slot, k = step.sampled_rows[c.filter_indices], self._columns
            columns = [c.filter_indices, k.top_k[slot], k.top_p[slot], k.min_p[slot]]
            filters = Filters(*self._staging.put(columns))
        if c.penalty_indices is not None:
            penalties = self._penalties(step, c.penalty_indices)
        return SamplingInputs(edits, penalties, temperature, uniform, filters)

    def _penalties(self, step: Step, rows: np.ndarray) -> Penalties:
        slot, k = step.sampled_rows[rows], self._columns
        self._remember(step, rows)
        at, index, prompts, lengths, repetition, presence, frequency = self._staging.put(
            [
                rows,
                slot,
                k.prompt_len[slot],
                step.sampled_positions[rows],
                k.repetition_penalty[slot],
                k.presence_penalty[slot],
                k.frequency_penalty[slot],
            ]
        )
        history = self._history[index]
        return Penalties(at, history, prompts, lengths, repetition, presence, frequency)

    def _remember(self, step: Step, rows: np.ndarray) -> None:
        """Write what the host knows of a penalised request into its history, once it starts.

        Tokens that come later are added on the device as they are chosen.
        """
        fresh = [
            step.sampled_requests[row]
            for row in rows.tolist()
            if not step.sampled_requests[row].num_in_flight
        ]
        wide = max((r.max_len for r in fresh), default=0)
        if wide > self._history.shape[1]:
            grown = self._newest.new_zeros(len(self._newest), 1 << (wide - 1).bit_length())
            grown[:, : self._history.shape[1]] = self._history
            self._history = grown
        for request in fresh:
            known = request.token_ids(0, request.num_tokens)
            self._history[request.row, : len(known)] = torch.from_numpy(known).to(self._device)


def _resolved(ids: Tensor, newest: Tensor) -> Tensor:
    if ids.is_cuda and resolve is not None:
        return resolve(ids, newest)
    return torch.where(ids < 0, newest[(-1 - ids).clamp_(min=0)], ids)
