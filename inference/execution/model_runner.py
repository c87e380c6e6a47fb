"""Run a step on the device: upload its arrays, run the model, sample, copy tokens back.

Step (host) ─one copy─▶ ids, positions, pages ─▶ model ─▶ logits to sample or score ─▶ tokens
                          ▲                                                             │
                          └──────────────── last token of each batch row ◀──────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention import PagedCache, Pages, Varlen, check_every_layer, step_context
from ...attention.hf import StatePool
from ...attention.paging import PageCopy
from ...runtime import is_out_of_memory
from ..metrics.stats import Stats
from ..scheduling.loop import OutOfMemory
from ..scheduling.step import Filters, LogitEdits, Penalties, SamplingInputs, Step, StepOutput
from .cuda_graphs import GraphReplays
from .logits_processing import process_logits
from .sampler import gather_logprobs, sample
from .transfer import HostDeviceCopy

try:
    from ...kernels import fill_last_tokens
except ImportError:  # Triton is not installed
    fill_last_tokens = None


class ModelRunner:
    """Run steps of a model over a paged KV cache."""

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        num_rows: int,
        stats: Stats,
        device: torch.device,
        graph_byte_budget: int,
        max_model_len: int,
        tokens_ahead: int = 0,
        states: StatePool | None = None,
    ):
        """Set up the buffers.

        num_rows: maximum requests of a step.
        graph_byte_budget: memory for CUDA graphs, 0 for none.
        tokens_ahead: capture the graphs of prefill steps up to this size before the first step.
        states: those of the running requests, by batch row, if the model keeps any.
        """
        self.lookahead = 1 if device.type == "cuda" else 0
        self.cache = cache
        self.states = states
        self._model = model
        self.device = device
        self._transfer = HostDeviceCopy(device)
        # The extra entry receives the tokens of a graph's padding rows.
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._token_history = self._last_tokens.new_zeros(len(self._last_tokens), 0)
        self._layers_checked = not cache.layer_shapes  # no layer attends
        self._stats = stats
        self.replays = GraphReplays(
            cache, self._last_tokens, graph_byte_budget, max_model_len, tokens_ahead, stats, states
        )

    @property
    def step_sizes(self) -> Sequence[int]:
        """Token counts of the graphs of prefill steps; empty if such steps run without a graph."""
        return self.replays.step_sizes

    def copy_pages(self, copies: list[PageCopy]) -> None:
        """Copy pages before the next step."""
        self.cache.copy_pages([c.source for c in copies], [c.target for c in copies])

    def launch(self, step: Step) -> Callable[[], StepOutput]:
        """Start a step; call the returned function to wait for its output."""
        try:
            return self._launch(step)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(str(error)) from None

    def _launch(self, step: Step) -> Callable[[], StepOutput]:
        replayed = self.replays.replay(step, self.forward)
        if replayed is not None:
            self._stats.record_graph_step(replayed.num_padding, len(self.replays))
            logits, sampled = replayed.logits, len(step.sampled_requests)
            if not step.sampling.argmax_only:
                tokens = self._sample(step, logits[:sampled])
            elif step.num_logprobs < 0 and (read_tokens := replayed.read_tokens) is not None:
                return lambda: StepOutput(read_tokens(sampled))
            else:
                tokens = replayed.tokens[:sampled]
        else:
            logits = self._forward(step)
            tokens = self._sample(step, logits[: len(step.sampled_requests)])
        outputs = [tokens]
        if step.num_logprobs >= 0:
            (targets,) = self._transfer.to_device([step.score_targets])
            logits = self._reported_logits(step, logits)
            outputs += gather_logprobs(logits, torch.cat([tokens, targets]), step.num_logprobs)
        read = self._transfer.to_host(outputs)
        return lambda: StepOutput(*read())

    def _reported_logits(self, step: Step, logits: Tensor) -> Tensor:
        """Return the logits whose log-probabilities are reported."""
        if step.sampling.processed_rows is None:
            return logits
        inputs, sampled = self._sampling_inputs(step), logits[: len(step.sampled_requests)]
        rows = inputs.processed_rows
        assert rows is not None
        # Tokens that this step added to the history are beyond the lengths of the penalties.
        processed = process_logits(sampled, inputs, self._token_history)
        return logits.float().index_copy(0, rows, processed[rows].float())

    def _forward(self, step: Step) -> Tensor:
        """Return the logits [R, V] of the rows to sample or score."""
        ids, positions, cu_seqlens, seq_lens, table, kv_slots, indices = self._transfer.to_device(
            [step.token_ids, step.positions, step.cu_seqlens, step.seq_lens, step.page_table,
             step.kv_slots, step.logits_indices]
        )  # fmt: skip
        pages = Pages(self.cache, table, seq_lens, kv_slots, step.max_seq_len)
        varlen = Varlen(cu_seqlens, step.max_query_len, pages)
        with self._states_of(step):
            return self.forward(ids, positions, varlen, indices)

    def _states_of(self, step: Step) -> AbstractContextManager[None]:
        if self.states is None:
            return nullcontext()
        lengths = np.diff(step.cu_seqlens)
        starts, rows = step.seq_lens - lengths, [request.row for request in step.requests]
        return self.states.step(rows, starts.tolist(), lengths.tolist())

    def forward(
        self, ids: Tensor, positions: Tensor, varlen: Varlen, logits_to_keep: Tensor | int
    ) -> Tensor:
        """Run the model on flat tokens; id -1 - i means the last token of batch row i."""
        ids = _with_last_tokens(ids, self._last_tokens)
        check = nullcontext() if self._layers_checked else check_every_layer(self._model)
        with check, step_context(self._model, varlen):
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_to_keep,
                varlen=varlen,
            )
        self._layers_checked = True
        return output.logits[0]

    def _sample(self, step: Step, logits: Tensor) -> Tensor:
        """Choose the tokens, and keep them on the device for the next step."""
        rows, positions = self._transfer.to_device([step.sampled_rows, step.sampled_positions])
        if step.sampling.penalties is not None:
            self._seed_history(step, step.sampling.penalties.rows)
        tokens = sample(logits, self._sampling_inputs(step), self._token_history)
        valid = tokens.clamp(min=0)
        self._last_tokens.index_copy_(0, rows, valid)
        if self._token_history.numel():
            positions = positions.clamp(max=self._token_history.shape[1] - 1)
            self._token_history.index_put_((rows, positions), valid)
        return tokens

    def _sampling_inputs(self, step: Step) -> SamplingInputs[Tensor]:
        """Copy the sampler's inputs to the device."""
        host, copy = step.sampling, self._transfer.to_device
        temperature = uniform = None
        if host.temperature is not None and host.uniform is not None:
            temperature, uniform = copy([host.temperature, host.uniform])
        return SamplingInputs(
            None if host.edits is None else LogitEdits(*copy(host.edits)),
            None if host.penalties is None else Penalties(*copy(host.penalties)),
            temperature,
            uniform,
            None if host.filters is None else Filters(*copy(host.filters)),
            None if host.processed_rows is None else copy([host.processed_rows])[0],
        )

    def _seed_history(self, step: Step, indices: np.ndarray) -> None:
        """When a request with penalties starts, write its tokens into the history on the device.

        Later tokens are added on the device as they are sampled.
        """
        requests = {step.sampled_requests[index]: None for index in indices.tolist()}
        fresh = [request for request in requests if not request.num_in_flight]
        width = max((r.max_len for r in fresh), default=0)
        if width > self._token_history.shape[1]:
            shape = len(self._last_tokens), 1 << (width - 1).bit_length()
            wider = self._last_tokens.new_zeros(*shape)
            wider[:, : self._token_history.shape[1]] = self._token_history
            self._token_history = wider
        for request in fresh:
            known = torch.from_numpy(request.token_ids(0, request.num_tokens + len(request.draft)))
            self._token_history[request.row, : len(known)] = known.to(self.device)


def _with_last_tokens(ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Replace the ids below zero: -1 - i becomes the last token of batch row i."""
    if ids.is_cuda and fill_last_tokens is not None:
        return fill_last_tokens(ids, last_tokens)
    return torch.where(ids < 0, last_tokens[(-1 - ids).clamp_(min=0)], ids)
