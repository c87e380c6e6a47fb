"""The engine's hold on a model: borrowed for a call, its working parts kept for the next one.

A session borrows the model, builds what is missing, and looks whether the weights are still those
that made the cached keys. Leaving it, by whatever way, the model is the trainer's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .executor import BuildKey, Executor, build_executor, build_key
from .live_model.borrow import borrow_model
from .live_model.cast_weights import detect_autocast_dtype
from .live_model.lockstep import gathers_parameters
from .live_model.weights_version import WeightsVersion
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.request import Request
from .scheduling.loop import Loop
from .settings import Settings


class ModelSession:
    """A model, and what was built around it."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        stats: Stats,
        trace: RequestTrace,
        ends: Callable[[Request], bool],
        wanted: Callable[[], bool],
        *,
        keep_memory: bool,
        dtype: torch.dtype | None,
    ):
        self.settings = settings
        self.machine: Executor | None = None
        self._model = model
        self._stats = stats
        self._trace = trace
        self._ends = ends
        self._wanted = wanted
        self._keep_memory = keep_memory
        self._dtype = dtype
        self._weights = WeightsVersion(model)
        self._modules: list[nn.Module] = list(model.modules())
        self._dial: dict[str, int] = {}
        """What was turned away from the settings, for this machine and those to come."""
        self._inside: tuple[torch.dtype | None] | None = None
        """What `detect_autocast_dtype` found, once it was asked."""

    @property
    def loop(self) -> Loop:
        assert self.machine is not None
        return self.machine.loop

    @property
    def room(self) -> int:
        """Tokens the cache holds."""
        pages = self.loop.scheduler.pages
        return pages.num_pages * pages.page_size

    @contextmanager
    def session(self, light: bool = False, look: bool = False) -> Iterator[list[Request]]:
        """Have the model; yields requests that ended while old steps were waited for.

        light: trust the version counters to tell of changed weights: for single steps.
        look: then look at a sample of the weights as well: for what is new among them.
        """
        modules = self._modules
        if not light and (now := list(self._model.modules())) != modules:
            modules = now
        kind = build_key(modules, self._narrow())
        self._make_way(kind)  # where that is refused, all is as it was
        self._modules = modules
        try:
            with ExitStack() as stack:
                stack.enter_context(borrow_model(self._model, kind.narrow, self._modules))
                stale = not light or self.machine is None or not self._weights.unchanged(look)
                if self.machine is None:
                    self.machine = self._assemble(kind)
                news = self._notice_weights() if stale else []
                if self.machine.shadow is not None:
                    stack.enter_context(self.machine.shadow.active())
                stack.enter_context(self.machine.fused.active(self._modules, stale))
                yield news
        except BaseException:
            self.machine = None
            raise
        finally:
            self.rest()

    def rest(self) -> None:
        """Unless it is to be kept, give all back once no request wants it."""
        if not self._keep_memory and self.machine is not None and not self._wanted():
            self.loop.drain()
            self.release()

    def dial(self, name: str) -> int:
        """Where `max_num_seqs` or `max_num_batched_tokens` stands."""
        if self.machine is not None:
            return getattr(self.loop.scheduler, name)
        return self._dial[name] if name in self._dial else getattr(self.settings, name)

    def turn(self, name: str, value: int) -> None:
        """Set it, now and for what is built later."""
        self._dial[name] = value
        if self.machine is not None:
            setattr(self.loop.scheduler, name, value)

    def forget(self) -> None:
        """Drop the cached prefixes, if there are any; what is under way goes on."""
        if self.machine is not None:
            self.loop.scheduler.pages.clear_prefixes()

    def release(self) -> None:
        """Give back pages, graphs and copies of weights."""
        self.machine = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _assemble(self, kind: BuildKey) -> Executor:
        began = perf_counter()
        machine = build_executor(
            self._model, self.settings, self._stats, self._trace, self._ends, kind
        )
        self._stats.setup_seconds += perf_counter() - began
        self._weights.refresh()
        machine.loop.scheduler.scope = str(self._weights.number)
        for name, value in self._dial.items():
            setattr(machine.loop.scheduler, name, value)
        return machine

    def _make_way(self, kind: BuildKey) -> None:
        """Give back what was built for a model of another kind."""
        if self.machine is None or self.machine.kind == kind:
            return
        if self._wanted():
            raise ValueError(
                f"requests run in {self.machine.kind}, the model is now in {kind}: finish them "
                "with the autocast, dtype, device and modules they began with, or abort them first"
            )
        self.release()

    def _narrow(self) -> torch.dtype | None:
        """The dtype to compute in, if the weights are wider."""
        parameter = next(self._model.parameters())
        kind = parameter.device.type
        dtype = self._dtype
        if dtype is None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        if dtype is None and "forward" in vars(self._model):
            if self._inside is None:
                self._inside = (detect_autocast_dtype(self._model),)
            (dtype,) = self._inside
        return None if dtype is None or dtype == parameter.dtype else dtype

    def _notice_weights(self) -> list[Request]:
        """Forget what other weights computed: cached prefixes, and the keys of running requests."""
        assert self.machine is not None
        runner, shadow = self.machine.runner, self.machine.shadow
        # Ranks that step together vote before a forward, which no graph holds.
        runner.may_capture = not gathers_parameters(self._model)
        moved = self._weights.moved()
        if shadow is not None:
            moved = shadow.refresh(self._modules) or moved
        if moved:
            runner.drop_graphs()
        changed = self._weights.refresh()
        runner.adapters = self._weights.adapters
        if not changed:
            return []
        news = self.loop.drain()
        scheduler = self.loop.scheduler
        scheduler.restart("the weights changed")
        scheduler.pages.clear_prefixes()
        scheduler.scope = str(self._weights.number)
        return news
