"""`ModelSession`: borrow the model for each call of an engine, keep its executor between calls.

Each call borrows the model, builds the executor if there is none, and drops the cached keys if the
weights have changed. After the call, even if it raises, the model is back in the trainer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from ..attention.backends import forced_paged_backend
from .execution.memory_budget import SPARE
from .executor import BuildKey, Executor, build_executor, build_fused_ops, build_key
from .fused.fused_ops import fused_ops_enabled
from .live_model.borrow import borrow_model
from .live_model.cast_weights import detect_autocast_dtype
from .live_model.lockstep import gathers_parameters
from .live_model.replica import replica_ranks, smallest_of_replica
from .live_model.weights_version import WeightsVersion
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.request import Request
from .scheduling.loop import StepLoop
from .scheduling.speculation import Speculation
from .settings import Settings

WeightsCheck = Literal["counters", "full"]
"""What is compared with the state of the model at the last check.

- "counters": the version counters of all tensors, and the adapters; if requests were added since
  then, also hooks, forwards and attributes.
- "full": all of these, the list of modules, and a sample of the values of each tensor.
"""


class ModelSession:
    """A live model, and the executor that was built for it."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        stats: Stats,
        trace: RequestTrace,
        has_requests: Callable[[], bool],
    ):
        self.settings = settings
        self.executor: Executor | None = None
        self._model = model
        self._stats = stats
        self._trace = trace
        self._has_requests = has_requests
        self._weights = WeightsVersion(model)
        self._modules: list[nn.Module] = list(model.modules())
        self._speculation = (
            None if settings.speculate is None else Speculation(settings.speculate, stats)
        )
        """Kept when the executor is released: earlier completions are still good drafts."""
        self._limits: dict[str, int] = {}
        """Limits that the user set after construction, for this executor and later ones."""
        self.has_new_requests = False
        """Whether requests were added since hooks, forwards and attributes were compared."""
        self.num_calls = 0
        """Unfinished blocking calls plus nested borrows."""
        self._autocast_dtype: tuple[torch.dtype | None] | None = None
        """Result of `detect_autocast_dtype`, once it was called."""

    @property
    def loop(self) -> StepLoop:
        assert self.executor is not None
        return self.executor.loop

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        pages = self.loop.scheduler.pages
        return pages.num_pages * pages.page_size

    @contextmanager
    def borrow(self, weights_check: WeightsCheck = "full") -> Iterator[list[Request]]:
        """Put the model into generation state; yield the requests that a changed model updated.

        An exception inside drops the executor and the requests that it runs.
        """
        full_check = weights_check == "full"
        modules = self._modules
        if full_check and (current := list(self._model.modules())) != modules:
            modules = current
        key = build_key(modules, self._cast_dtype())
        self._release_if_incompatible(key)  # if it raises, nothing has changed
        self._modules = modules
        self.num_calls += 1
        try:
            with ExitStack() as stack:
                stack.enter_context(borrow_model(self._model, key.cast_dtype, self._modules))
                may_differ = full_check or self.executor is None
                if not may_differ:  # at every step: what is read here is the same on all ranks
                    may_differ = not self._is_same_model()
                self.has_new_requests = False
                if self.executor is None:
                    self.executor = self._build(key)
                updated = self._invalidate_if_changed() if may_differ else []
                if self.executor.cast_weights is not None:
                    stack.enter_context(self.executor.cast_weights.active())
                stack.enter_context(self.executor.fused_ops.active(self._modules, may_differ))
                yield updated
        except BaseException:
            self.executor = None
            raise
        finally:
            self.num_calls -= 1
            self.release_if_idle()

    def sharing_key(self) -> Hashable:
        """Return a key; two threads may share steps if theirs are equal, and never if it is None.

        A step uses the autocast and contexts of the thread that runs it. If a step involves other
        ranks, all of them must run the same requests.
        """
        if not fused_ops_enabled() or len(replica_ranks(self._model)) > 1:
            return None
        modules = tuple(self._model.modules())
        key = build_key(modules, self._cast_dtype())
        # Each thread has its own current stream, and two streams do not wait for each other.
        stream = torch.cuda.current_stream(key.device) if key.device.type == "cuda" else None
        return None if gathers_parameters(modules) else (key, forced_paged_backend(), stream)

    def _is_same_model(self) -> bool:
        """Whether the model is that of the last check, without reading values of tensors."""
        if self.has_new_requests and not self._weights.forwards_unchanged():
            return False
        return self._weights.unchanged()

    def is_current(self) -> bool:
        """Whether modules, tensors, version counters and adapters are those of the last check."""
        self._release_if_incompatible(build_key(list(self._model.modules()), self._cast_dtype()))
        return self.executor is not None and self._weights.unchanged()

    def release_if_idle(self) -> None:
        """Release everything if no call and no request is left, unless it is kept."""
        if self.num_calls or self._has_requests():
            return
        if self.settings.keep_memory and not self._precedes_training():
            return
        if self.executor is not None:
            self.loop.drain()
            self.release()

    def _precedes_training(self) -> bool:
        """Whether a training is about to need memory, and what it leaves unused is not known yet.

        That shows in its second step: the state of most optimizers is allocated by the first.
        """
        on_gpu = self.executor is not None and self.executor.key.device.type == "cuda"
        is_new = self._model.training and self._weights.num_steps < 2
        return on_gpu and is_new and self.settings.memory == SPARE

    def get_limit(self, name: str) -> int:
        """The current `max_num_seqs` or `max_num_batched_tokens`."""
        if self.executor is not None:
            return getattr(self.loop.scheduler, name)
        return self._limits[name] if name in self._limits else getattr(self.settings, name)

    def set_limit(self, name: str, value: int) -> None:
        """Set one of these limits, for this executor and later ones."""
        self._limits[name] = value
        if self.executor is not None:
            self._apply_limits(self.loop)

    def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes; running requests are not affected."""
        if self.executor is not None:
            self.loop.scheduler.pages.clear_prefixes()

    def release(self) -> None:
        """Free pages, CUDA graphs and copies of weights."""
        self.executor = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _build(self, key: BuildKey) -> Executor:
        start = perf_counter()
        executor = build_executor(self._model, self.settings, self._stats, self._trace, key)
        self._stats.setup_seconds += perf_counter() - start
        self._weights.refresh()
        executor.loop.speculation = self._speculation
        executor.loop.scheduler.cache_salt = str(self._weights.number)
        self._apply_limits(executor.loop)
        return executor

    def _apply_limits(self, loop: StepLoop) -> None:
        for name, value in self._limits.items():
            setattr(loop.scheduler, name, value)
        if "max_num_batched_tokens" in self._limits:
            loop.costs.max_tokens_while_decoding = None

    def _release_if_incompatible(self, key: BuildKey) -> None:
        """Release an executor that was built for another key."""
        if self.executor is None or self.executor.key == key:
            return
        if self._has_requests():
            others = " (others)" if str(key) == str(self.executor.key) else ""
            raise ValueError(
                f"requests run in {self.executor.key}, the model is now in {key}{others}: finish "
                "them with the autocast, dtype, device and modules they began with, or abort them"
            )
        self.release()

    def _cast_dtype(self) -> torch.dtype | None:
        """Return the dtype to compute in if it differs from that of the weights."""
        parameter = next(self._model.parameters())
        device_type = parameter.device.type
        dtype = self.settings.dtype
        if dtype is None and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        if dtype is None and "forward" in vars(self._model):
            if self._autocast_dtype is None:
                self._autocast_dtype = (detect_autocast_dtype(self._model),)
            (dtype,) = self._autocast_dtype
        return None if dtype is None or dtype == parameter.dtype else dtype

    def _on_any_rank(self, changed: bool) -> bool:
        """Whether any rank of the replica has seen a change; each checks its own shard."""
        return not smallest_of_replica(self._model, int(not changed))

    def _invalidate_if_changed(self) -> list[Request]:
        """Drop cached prefixes and the keys of running requests if the weights have changed."""
        assert self.executor is not None
        runner, cast_weights = self.executor.runner, self.executor.cast_weights
        # Ranks in lockstep vote before each forward, which a CUDA graph cannot contain.
        runner.replays.may_capture = not gathers_parameters(self._modules)
        recast = cast_weights is not None and cast_weights.refresh(self._modules)
        changed = self._on_any_rank(self._weights.refresh())
        if self._weights.moved or recast:
            runner.replays.drop()
        if changed or self._weights.moved or recast:
            self.executor.fused_ops.drop_patches()
        if self._weights.forward_changed:  # graphs and fused kernels contain the old forwards
            runner.replays.drop()
            self.executor.fused_ops = build_fused_ops(self._model, runner, self.settings)
        runner.replays.adapters = self._weights.adapters
        if not changed:
            return []
        updated = self.loop.drain()
        scheduler = self.loop.scheduler
        scheduler.preempt_all("the weights changed")
        scheduler.pages.clear_prefixes()
        scheduler.cache_salt = str(self._weights.number)
        return updated
