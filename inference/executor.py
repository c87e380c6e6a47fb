"""Build an `Executor`: cache, scheduler, model runner and step loop for a model as it is now.

Settings ─▶ memory budget ─▶ PagedCache ─▶ Scheduler ┐
                                 └───▶ ModelRunner ──┴─▶ StepLoop
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..attention import PageAllocator, PagedCache, check_supported, layer_shapes
from ..attention.hf import StatefulModule, StatePool, stateful_parts
from .execution.cuda_graphs import graph_bytes
from .execution.memory_budget import budget_bytes, count_engine_bytes
from .execution.model_runner import ModelRunner
from .fused.fused_ops import FusedOps, verified_ops
from .fused.stacked_weights import stacked_bytes
from .live_model.cast_weights import CastWeights, is_matmul
from .live_model.lockstep import gathers_parameters
from .live_model.replica import smallest_of_replica
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .scheduling.cache_checker import CacheChecker
from .scheduling.loop import StepLoop
from .scheduling.scheduler import Scheduler
from .scheduling.step_costs import StepCosts
from .settings import Settings

log = logging.getLogger("nopad.inference")


@dataclass(frozen=True, slots=True)
class BuildKey:
    """The state of a model that an executor is built for; another key needs another executor."""

    device: torch.device
    compute_dtype: torch.dtype
    cast_dtype: torch.dtype | None
    """Dtype to compute in, if it is narrower than the weights."""
    modules: Sequence[nn.Module]
    """The fused kernels were verified on these; adding or removing adapters changes the list."""

    def __str__(self) -> str:
        return f"{self.compute_dtype} on {self.device}, {len(self.modules)} modules"


@dataclass(slots=True, eq=False)
class Executor:
    """Everything that was built for one model."""

    loop: StepLoop
    runner: ModelRunner
    cast_weights: CastWeights | None
    fused_ops: FusedOps
    key: BuildKey


def build_key(modules: Sequence[nn.Module], cast_dtype: torch.dtype | None) -> BuildKey:
    """Return the key of a model as it is now.

    Keys and values have the dtype of the first weight that is used in a matrix product.
    """
    weight, gathered_dtype = None, None
    for module in modules:
        if isinstance(module, FSDPModule):  # shards have another dtype than gathered parameters
            gathered_dtype = module._get_fsdp_state()._mp_policy.param_dtype
        if (weight := _matmul_weight(module)) is not None:
            break
    if weight is None:
        weight = next(modules[0].parameters())
    compute_dtype = cast_dtype or gathered_dtype or weight.dtype
    return BuildKey(weight.device, compute_dtype, cast_dtype, modules)


def _matmul_weight(module: nn.Module) -> Tensor | None:
    weight = module._parameters.get("weight") if is_matmul(module) else None
    return weight if weight is not None and weight.is_floating_point() else None


def build_executor(
    model: Any, settings: Settings, stats: Stats, trace: RequestTrace, key: BuildKey
) -> Executor:
    """Build everything for a model that has this key now."""
    device = _single_device(model)
    check_supported(model, states=True)
    stateful = stateful_parts(model)
    cast_weights = None if key.cast_dtype is None else CastWeights(key.modules, key.cast_dtype)
    budget = budget_bytes(settings.memory, device) - (cast_weights.bytes if cast_weights else 0)
    on_gpu = device.type == "cuda"
    captures = on_gpu and settings.cuda_graphs and not gathers_parameters(key.modules)
    if captures or (on_gpu and not stateful):
        budget -= stacked_bytes(model, key.compute_dtype.itemsize)
    graph_budget = _graph_budget(model, settings, key.compute_dtype, budget) if captures else 0
    budget -= graph_budget
    num_rows = _num_rows(model, settings, stateful, budget)
    state_bytes = (num_rows + 1) * sum(each.bytes for each in stateful.values())
    states = StatePool(stateful, num_rows, device) if stateful else None
    cache = _build_cache(model, settings, key, budget - state_bytes, num_rows)
    count_engine_bytes(cache, cache.num_pages * cache.page_bytes + state_bytes, device)
    scheduler = Scheduler(
        PageAllocator(cache.num_pages, settings.page_size), max_num_seqs=num_rows,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len, max_waiting=settings.max_waiting,
        has_states=bool(stateful), trace=trace,
    )  # fmt: skip
    runner = ModelRunner(
        model, cache, num_rows, stats, device, graph_budget, settings.max_model_len,
        tokens_ahead=0 if settings.target_itl is None else settings.max_num_batched_tokens,
        states=states,
    )  # fmt: skip
    checker = CacheChecker(cache.num_pages, settings.page_size) if settings.debug else None
    costs = StepCosts(settings.target_itl, settings.max_tokens_while_decoding)
    loop = StepLoop(scheduler, runner, stats, cache_checker=checker, costs=costs)
    return Executor(loop, runner, cast_weights, build_fused_ops(model, runner, settings), key)


def build_fused_ops(model: Any, runner: ModelRunner, settings: Settings) -> FusedOps:
    """Verify fused kernels on the current forwards of a model; there are none on a CPU.

    Models that keep states have them only if steps may be graphs.
    """
    max_graph_rows = settings.max_num_seqs if runner.replays.enabled else 0
    if runner.device.type != "cuda" or (runner.states is not None and not max_graph_rows):
        return FusedOps([])
    return FusedOps(verified_ops(model, runner.cache, max_graph_rows, runner.states))


def _num_rows(
    model: Any, settings: Settings, stateful: dict[nn.Module, StatefulModule], budget: int
) -> int:
    """Return how many requests run at once: their states take at most half of the memory."""
    if not stateful:
        return settings.max_num_seqs
    row_bytes = sum(each.bytes for each in stateful.values())
    num_rows = smallest_of_replica(model, min(settings.max_num_seqs, budget // 2 // row_bytes))
    if num_rows < 1:
        raise ValueError(
            f"memory={settings.memory!r} leaves {budget} bytes, and the states of one request take "
            f"{row_bytes}, at most half of them: allow more memory"
        )
    log.info(
        "%s keeps states: %d requests run at once (%.1f MiB each), without prefix caching",
        type(model).__name__, num_rows, row_bytes / 2**20,
    )  # fmt: skip
    return num_rows


def _build_cache(
    model: Any, settings: Settings, key: BuildKey, budget: int, num_rows: int
) -> PagedCache:
    shapes, page_size, dtype = layer_shapes(model), settings.page_size, key.compute_dtype
    page_bytes = PagedCache.bytes_per_page(shapes, page_size, settings.quantized or dtype)
    num_pages = num_rows * -(-settings.max_model_len // page_size)
    if page_bytes:  # otherwise no layer attends
        num_pages = smallest_of_replica(model, min(budget // page_bytes, num_pages))
    if num_pages < 1:
        raise ValueError(
            f"memory={settings.memory!r} leaves {budget} bytes, one page of {page_size} "
            f"tokens takes {page_bytes}: allow more memory"
        )
    return PagedCache(num_pages, page_size, shapes, dtype, key.device, settings.quantized)


def _single_device(model: Any) -> torch.device:
    devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the model is on {', '.join(sorted(map(str, devices)))}: the engine runs it on one "
            "device; load it without device_map, or move it with model.to(device)"
        )
    return devices.pop()


def _graph_budget(model: Any, settings: Settings, dtype: torch.dtype, budget: int) -> int:
    """Return the bytes for CUDA graphs: those of all shapes, at most a quarter of the memory."""
    config = model.config.get_text_config()
    sizes = settings.max_num_seqs, config.vocab_size, config.hidden_size, dtype.itemsize
    return max(1, min(graph_bytes(*sizes), budget // 4))
