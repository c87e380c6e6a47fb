"""`StatePool`: recurrent and convolutional states of the engine's sequences; probes that find them.

    batch row    0    1    2          the states of a layer: [rows, ...]
    step        [b | a a a a | c]     b and c, one token each, run as one batch; the chunk a alone

Modules of Transformers read and write their states in a `Cache`. In a step, such a module runs
once for all sequences with one token, and once for each chunk of a prompt, with a cache that holds
the states of these sequences. A sequence that starts has no state yet: what its row held before is
never read, so nothing has to be reset.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ...runtime import stock_class
from .call_log import attends

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "varlen")
"""Arguments that describe a row of several sequences."""
State = tuple[Tensor | None, Tensor | None]
"""The convolutional and the recurrent state [B, ...] of a module; None where it has none."""
Forward = Callable[..., Any]
"""Takes a module, its forward, and that forward's arguments."""
IN_PLACE = "_nopad_updates_states_in_place"
"""An attribute of a forward that gets the states of all rows, and updates those of `current_rows`
in place; for one token of each sequence."""
_rows: ContextVar[Tensor] = ContextVar("nopad_rows")
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_CUTS = (0, 5, 6, 12)
"""Where the probe cuts its tokens: into a prompt, one token, and several."""
_TOKENS = _CUTS[-1]


@dataclass(frozen=True, slots=True)
class StatefulModule:
    """What a module that keeps a state needs."""

    state: State
    """That of one sequence, on "meta"."""
    parameters: tuple[str, ...]
    """Names of its forward's parameters; the hidden states are the first."""
    token_by_token: bool = False
    """Whether it continues a sequence with one token only, as Mamba's torch code does."""

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.state if part is not None)


@contextmanager
def in_rows(rows: Tensor) -> Iterator[None]:
    """Let forwards that are `IN_PLACE` update these rows inside, int64 [B]."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def current_rows() -> Tensor:
    """Return the rows of `in_rows`."""
    return _rows.get()


class StatePool:
    """States of every layer for a number of running sequences.

    Args:
        modules: those that keep a state, as `stateful_parts` returns them.
        num_rows: sequences that it holds; one row more is for those that fill up a CUDA graph.
        device: where the states are.
    """

    def __init__(
        self, modules: dict[nn.Module, StatefulModule], num_rows: int, device: torch.device | str
    ):
        def rows(state: Tensor) -> Tensor:
            return torch.zeros(num_rows + 1, *state.shape[1:], dtype=state.dtype, device=device)

        self._forwards = {
            module: _StepForward(module, kept, _each(kept.state, rows))
            for module, kept in modules.items()
        }
        self._device = device

    @property
    def modules(self) -> dict[nn.Module, StatefulModule]:
        """Those that keep a state."""
        return {module: forward.kept for module, forward in self._forwards.items()}

    def blank(self, num_rows: int) -> StatePool:
        """Return a pool of this kind, for other sequences."""
        return StatePool(self.modules, num_rows, self._device)

    def step(
        self, rows: Iterable[int], starts: Iterable[int], lengths: Iterable[int]
    ) -> AbstractContextManager[None]:
        """Run the modules of a forward inside on sequences that are laid end to end.

        rows: of each in this pool; starts: tokens that each has run before; lengths: tokens now.
        """
        return self._run(list(self._group(rows, starts, lengths)))

    def decode(self, rows: Tensor) -> AbstractContextManager[None]:
        """Run the modules of a forward inside on one token of each sequence that runs already.

        rows: int64 [B], of each in this pool; nothing is read on the host.
        """
        return self._run([SequenceGroup(slice(None), 1, rows, is_fresh=False)])

    @contextmanager
    def _run(self, groups: list[SequenceGroup]) -> Iterator[None]:
        """Let the modules run these groups inside.

        The forwards are the same objects in every step, and know their states themselves.
        """
        for module, forward in self._forwards.items():
            forward.groups, forward.own = groups, vars(module).get("forward")
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, forward in self._forwards.items():
                del vars(module)["forward"]
                if forward.own is not None:
                    vars(module)["forward"] = forward.own

    def _group(
        self, rows: Iterable[int], starts: Iterable[int], lengths: Iterable[int]
    ) -> Iterator[SequenceGroup]:
        offset, single_tokens, single_rows = 0, list[int](), list[int]()
        for row, start, length in zip(rows, starts, lengths, strict=True):
            if length == 1 and start:
                single_tokens.append(offset)
                single_rows.append(row)
            elif length:
                yield SequenceGroup.chunk(offset, offset + length, row, not start, self._device)
            offset += length
        if single_rows:
            tokens, at = torch.tensor([single_tokens, single_rows], device=self._device)
            yield SequenceGroup(tokens, 1, at, is_fresh=False)


class _StepForward:
    """The forward of one module in a step: it runs groups of sequences, and keeps their states."""

    def __init__(self, module: nn.Module, kept: StatefulModule, states: State):
        self.module, self.kept, self.states = module, kept, states
        self.groups: list[SequenceGroup] = []
        self.own: Callable[..., Any] | None = None
        """What the module ran instead of its class's forward."""

    @torch.compiler.disable  # a graph of the layer around it would hold for no other layer
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = partial(stock_class(self.module).forward, self.module)
        forward = self.own or stock
        is_in_place = hasattr(forward, IN_PLACE)
        if not is_in_place:
            stock = forward
        groups, named, outputs = self.groups, _named(self.kept, args, kwargs), []
        if self.kept.token_by_token:
            groups = [part for group in groups for part in group.tokens_alone()]
        for group in groups:
            with in_rows(group.rows):
                if is_in_place and group.continues_by_one:
                    out, _ = group.run(self.module, forward, self.kept, self.states, named)
                else:
                    states = group.read(self.states)
                    out, new_state = group.run(self.module, stock, self.kept, states, named)
                    group.write(self.states, new_state)
            outputs.append(out)
        return _join(groups, outputs)


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """B sequences of equal length that a module runs together."""

    tokens: slice | Tensor
    """Where their B * L tokens are in the step."""
    length: int
    """L."""
    rows: Tensor
    """int64 [B]: their rows in the pool."""
    is_fresh: bool
    """Whether they start in this step."""

    @staticmethod
    def chunk(start: int, end: int, row: int, is_fresh: bool, device: Any) -> SequenceGroup:
        """Return one sequence alone."""
        rows = torch.tensor([row], device=device)
        return SequenceGroup(slice(start, end), end - start, rows, is_fresh)

    def tokens_alone(self) -> list[SequenceGroup]:
        """Return a group for each token if a sequence continues with several."""
        if self.is_fresh or isinstance(self.tokens, Tensor) or self.length == 1:
            return [self]
        ends = range(self.tokens.start + 1, self.tokens.stop + 1)
        return [SequenceGroup(slice(end - 1, end), 1, self.rows, is_fresh=False) for end in ends]

    @property
    def continues_by_one(self) -> bool:
        """Whether each sequence has one token, and a state already."""
        return self.length == 1 and not self.is_fresh

    def has_tokens(self, value: Any) -> bool:
        """Return whether a value is a tensor [B, L, ...] of these sequences."""
        return isinstance(value, Tensor) and value.shape[:2] == (len(self.rows), self.length)

    def read(self, states: State) -> State:
        if self.is_fresh:
            return _each(states, lambda s: s.new_zeros(len(self.rows), *s.shape[1:]))
        return _each(states, lambda s: s[self.rows])

    def write(self, states: State, new: State) -> None:
        for state, rows in zip(states, new, strict=True):
            if state is not None and rows is not None:
                state[self.rows] = rows.to(state.dtype)

    def run(
        self, module: nn.Module, stock: Forward, kept: StatefulModule, state: State, named: dict
    ) -> tuple[Any, State]:
        """Run a module on these sequences; return its output and their new states."""
        total = named[kept.parameters[0]].shape[1]
        cache = GroupCache(module, state, self.is_fresh)
        parts = {name: self._part(value, total) for name, value in named.items()}
        return stock(**parts | {_cache_argument(kept.parameters): cache}), cache.state

    def _part(self, value: Any, total: int) -> Any:
        """Return the part [B, L, ...] of an argument; what has no token dim is passed as it is."""
        if isinstance(value, tuple):
            return tuple(self._part(each, total) for each in value)
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total):
            return value[0, self.tokens].unflatten(0, (len(self.rows), -1))
        return value


class GroupCache(Cache):
    """The states of a group of sequences, as a module of Transformers reads and writes them."""

    def __init__(self, module: Any, state: State, is_fresh: bool):
        layer = self._layer = LinearAttentionLayer()
        layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent = state
        layer.is_conv_states_initialized[0] = conv is not None
        layer.is_recurrent_states_initialized[0] = recurrent is not None
        layer.conv_kernel_size[0] = None if conv is None else conv.shape[-1]
        layer.has_previous_state[0] = not is_fresh
        super().__init__(layers=[layer] * (module.layer_idx + 1))

    @property
    def state(self) -> State:
        return self._layer.conv_states[0], self._layer.recurrent_states[0]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Tensor:
        """Keep the new state itself; a copy would read and write all states once more."""
        self._layer.recurrent_states[0] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of MiniMax's lightning attention, whose cache has its own methods."""
        return self._layer.recurrent_states[0] if self._layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Set the state of MiniMax's lightning attention."""
        self._layer.recurrent_states[0] = linear_cache


def _join(groups: list[SequenceGroup], outputs: list[Any]) -> Any:
    """Return what a module returns for a step, from its outputs for the groups."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(groups, list(each)) for each in zip(*outputs, strict=True))
    if not all(map(SequenceGroup.has_tokens, groups, outputs)):
        return outputs[0]
    values = [out.flatten(0, 1) for out in outputs]
    if len(values) == 1 and isinstance(groups[0].tokens, slice):
        return values[0][None]
    joined = values[0].new_empty(sum(map(len, values)), *values[0].shape[1:])
    for group, part in zip(groups, values, strict=True):
        joined[group.tokens] = part
    return joined[None]


def probe_states(
    run_model: Callable[[int], Any], model: nn.Module
) -> tuple[dict[nn.Module, StatefulModule], list[str]]:
    """Return the modules that keep a state, and the names of those that lose it between chunks.

    run_model: runs a number of tokens as one sequence.
    """
    found: dict[nn.Module, StatefulModule] = {}
    faulty: list[str] = []
    parameters = _candidates(model)

    def forward(module: nn.Module, stock: Forward, *args: Any, **kwargs: Any) -> Any:
        nothing = StatefulModule((None, None), parameters[module])
        named, hidden = _named(nothing, args, kwargs), parameters[module][0]
        named[hidden] = named[hidden].nan_to_num(0.0)  # NaN marks the states in `reads_state`
        device = named[hidden].device

        def run(cuts: Iterable[int], state: State | None = None) -> tuple[list[Any], State]:
            outputs = []
            for start, end in pairwise(cuts):
                group = SequenceGroup.chunk(start, end, 0, state is None, device)
                out, state = group.run(module, stock, nothing, state or (None, None), named)
                outputs.append(out)
            return outputs, state or (None, None)

        (out,), state = run((0, _TOKENS))
        if state == (None, None):
            return out
        whole, restarted = token_outputs([out]), token_outputs(run((_CUTS[1], _TOKENS))[0])
        for token_by_token in (False, True):
            cuts = (0, *range(_CUTS[1], _TOKENS + 1)) if token_by_token else _CUTS
            chunked = token_outputs(run(cuts)[0][1:])
            reads = reads_state(run, _CUTS[1] + 1 if token_by_token else _TOKENS)
            if reads and all(map(is_nearer, chunked, restarted, whole)):
                break
        else:
            faulty.append(type(module).__name__)
        on_meta = _each(state, lambda s: s.to("meta"))
        found[module] = StatefulModule(on_meta, parameters[module], token_by_token)
        return out

    with torch.no_grad(), replaced_forwards(parameters, forward):
        run_model(_TOKENS)
    return found, faulty


def reads_state(run: Callable[..., tuple[list[Any], State]], end: int) -> bool:
    """Whether the next tokens of a sequence, up to `end`, depend on each part of its state.

    NaN in a part must reach them. `is_nearer` cannot tell: with Mamba's initial weights, tokens
    that ignore the recurrent state differ by less than it allows, and over a long prompt by more.
    """
    for part in range(2):
        state = list(run((0, _CUTS[1]))[1])
        if (values := state[part]) is not None:
            state[part] = torch.full_like(values, math.nan)
            outputs, _ = run((_CUTS[1], end), (state[0], state[1]))
            if not any(each.isnan().any() for each in token_outputs(outputs)):
                return False
    return True


def is_nearer(chunked: Tensor, restarted: Tensor, whole: Tensor) -> bool:
    """Whether every token of chunks is that of the whole, at its end, but for rounding.

    restarted: the same tokens without a state; they tell how much it matters in any precision.
    """
    whole = whole[:, -chunked.shape[1] :]
    differences = (chunked - whole, restarted - whole, whole)
    error, lost, size = (each.float().norm(dim=-1) for each in differences)
    return not (error > torch.maximum(0.25 * lost, 0.02 * size)).any()  # NaN is not a fault


def silent_states(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Make modules that keep a state return zeros inside."""

    def zeros(value: Any) -> Any:
        return torch.zeros_like(value) if isinstance(value, Tensor) else value

    def forward(_: nn.Module, stock: Forward, *args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        return tuple(map(zeros, out)) if isinstance(out, tuple) else zeros(out)

    return replaced_forwards(modules, forward)


@contextmanager
def replaced_forwards(modules: Iterable[nn.Module], forward: Forward) -> Iterator[None]:
    """Call `forward` with a module and its own forward, in place of that forward, inside."""
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module, own in before:
            stock = own or partial(stock_class(module).forward, module)
            vars(module)["forward"] = partial(forward, module, stock)
        yield
    finally:
        for module, own in before:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


def _candidates(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Return the modules that take a cache and do not attend, with their forward's parameters."""
    found: dict[nn.Module, tuple[str, ...]] = {}
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            names = tuple(inspect.signature(stock_class(module).forward).parameters)[1:]
            if _cache_argument(names) and not any(map(attends, module.modules())):
                found[module] = names
    return found


def _cache_argument(parameters: tuple[str, ...]) -> str:
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def _named(kept: StatefulModule, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of a call by name, but for those that describe a row."""
    named = dict(zip(kept.parameters, args, strict=False)) | kwargs
    return {name: value for name, value in named.items() if name not in BOUNDARIES}


def _each(state: State, function: Callable[[Tensor], Tensor]) -> Any:
    return tuple(None if part is None else function(part) for part in state)


def token_outputs(chunks: list[Any]) -> list[Tensor]:
    """Return the tensors [B, L, D] that a module returns, from its outputs for each chunk."""
    parts = [out if isinstance(out, tuple) else (out,) for out in chunks]
    shape = parts[0][0].shape
    alike = [
        n
        for n, part in enumerate(parts[0])
        if isinstance(part, Tensor) and part.ndim == len(shape) and part.shape[:2] == shape[:2]
    ]
    return [torch.cat([part[n].flatten(2) for part in parts], 1) for n in alike]
