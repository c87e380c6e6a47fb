"""The engine's working parts, built for one model within `memory`, and given back whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..attention import PageAllocator, PagedCache, check_supported, layer_shapes
from .execution.cuda_graphs import graph_bytes
from .execution.memory_budget import budget_bytes, record_engine_bytes
from .execution.model_runner import ModelRunner
from .fused.fused_ops import FusedOps, verified_ops
from .fused.qkv_weights import stacked_bytes
from .live_model.cast_weights import CastWeights, is_matmul
from .live_model.lockstep import gathers_parameters
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.request import Request
from .scheduling.cache_checker import CacheChecker
from .scheduling.loop import Loop
from .scheduling.scheduler import Scheduler
from .scheduling.slot_params import SlotParams
from .settings import Settings


@dataclass(frozen=True, slots=True)
class BuildKey:
    """What a machine is built for; it serves no other."""

    device: torch.device
    dtype: torch.dtype
    """Of keys and values."""
    narrow: torch.dtype | None
    """The dtype computed in where the weights are wider."""
    modules: Sequence[nn.Module]
    """On these the fused kernels were proven; adapters, for instance, come and go."""

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device}, {len(self.modules)} modules"


@dataclass(slots=True, eq=False)
class Executor:
    """Cache, scheduler, runner and loop around one model."""

    loop: Loop
    runner: ModelRunner
    shadow: CastWeights | None
    fused: FusedOps
    """Fused kernels that fit the model."""
    kind: BuildKey


def build_key(modules: Sequence[nn.Module], narrow: torch.dtype | None) -> BuildKey:
    """Of what kind a model is now; `narrow` is the dtype of autocast, if the weights are wider.

    Keys arrive in the dtype of the first matrix a layer multiplies with.
    """
    weight, gathered = None, None
    for module in modules:
        if isinstance(module, FSDPModule):  # a shard has another dtype than what is computed with
            gathered = module._get_fsdp_state()._mp_policy.param_dtype
        if (weight := _matrix(module)) is not None:
            break
    if weight is None:
        weight = next(modules[0].parameters())
    return BuildKey(weight.device, narrow or gathered or weight.dtype, narrow, modules)


def _matrix(module: nn.Module) -> Tensor | None:
    weight = module._parameters.get("weight") if is_matmul(module) else None
    return weight if weight is not None and weight.is_floating_point() else None


def build_executor(
    model: Any,
    settings: Settings,
    stats: Stats,
    trace: RequestTrace,
    ends: Any,
    kind: BuildKey,
) -> Executor:
    """Build everything for a model that is of this kind now."""
    check_supported(model)
    device, dtype = _only_device(model), kind.dtype
    shapes = layer_shapes(model)
    shadow = None if kind.narrow is None else CastWeights(kind.modules, kind.narrow)
    page = PagedCache.bytes_per_page(shapes, settings.page_size, dtype)
    most = settings.max_num_seqs * -(-settings.max_model_len // settings.page_size)
    budget = budget_bytes(settings.memory, device) - (shadow.bytes if shadow else 0)
    graphs = 0
    if device.type == "cuda":
        budget -= stacked_bytes(model, dtype.itemsize)
        if settings.cuda_graphs and not gathers_parameters(model):
            graphs = _room_for_graphs(model, settings, dtype, budget)
        budget -= graphs
    count = min(budget // page, most)
    if count < 1:
        raise ValueError(
            f"memory={settings.memory!r} leaves {budget} bytes, one page of {settings.page_size} "
            f"tokens takes {page}: give more memory"
        )
    cache = PagedCache(count, settings.page_size, shapes, dtype, device)
    record_engine_bytes(count * page, device)
    columns = SlotParams(settings.max_num_seqs)

    def admit(request: Request) -> None:
        columns.admit(request)
        stats.note_admitted(request, perf_counter())

    scheduler = Scheduler(
        PageAllocator(count, settings.page_size),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        # On a GPU a step with a prompt in it is no graph and takes long: take in several at a time.
        admit_at_once=32 if device.type == "cuda" else 1,
        admit=admit,
        trace=trace,
    )
    runner = ModelRunner(model, cache, columns, stats, device, graphs)
    canary = CacheChecker(count, settings.page_size) if settings.debug else None
    loop = Loop(scheduler, runner, columns, stats, ends=ends, canary=canary)
    most = settings.max_num_seqs if graphs else 0
    fused = verified_ops(model, cache, most) if device.type == "cuda" else []
    return Executor(loop, runner, shadow, FusedOps(fused), kind)


def _only_device(model: Any) -> torch.device:
    devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on {', '.join(sorted(map(str, devices)))}: the engine runs it on one "
            "device; load it without device_map, or move it with model.to(device)"
        )
    return devices.pop()


def _room_for_graphs(model: Any, settings: Settings, dtype: torch.dtype, budget: int) -> int:
    """What graphs of every batch size keep, but no more than a quarter of the memory."""
    vocabulary = model.config.get_text_config().vocab_size
    return max(1, min(graph_bytes(settings.max_num_seqs, vocabulary, dtype.itemsize), budget // 4))
