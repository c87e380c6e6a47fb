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

from .borrow import borrowed
from .lock_step import gathers
from .loop import Loop
from .machine import Machine, assemble
from .request import Request
from .request_trace import Trace
from .settings import Settings
from .stats import Stats
from .weights import WeightsVersion, autocast_inside


class Tenancy:
    """A model, and what was built around it."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        stats: Stats,
        trace: Trace,
        ends: Callable[[Request], bool],
        *,
        keep: bool,
        dtype: torch.dtype | None,
    ):
        self.settings = settings
        self.machine: Machine | None = None
        self._model = model
        self._stats = stats
        self._trace = trace
        self._ends = ends
        self._keep = keep
        self._dtype = dtype
        self._weights = WeightsVersion(model)
        self._modules: list[nn.Module] = list(model.modules())
        self._inside: tuple[torch.dtype | None] | None = None
        """What `autocast_inside` found, once it was asked."""

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

        Args:
            light: trust the version counters to tell of changed weights: for single steps.
            look: then look at a sample of the weights as well: for what is new among them.
        """
        narrow = self._narrow()
        if not light:
            self._modules = list(self._model.modules())
        try:
            with ExitStack() as stack:
                stack.enter_context(borrowed(self._model, narrow, self._modules))
                if self.machine is not None and self.machine.narrow != narrow:
                    self._change_dtype()
                stale = not light or self.machine is None or not self._weights.unchanged(look)
                if self.machine is None:
                    self.machine = self._assemble(narrow)
                if stale:  # ranks that step together vote before a forward, which no graph holds
                    self.machine.runner.may_capture = not gathers(self._model)
                news = self._notice_weights() if stale else []
                if self.machine.shadow is not None:
                    stack.enter_context(self.machine.shadow.active(stale))
                stack.enter_context(self.machine.fused.active(self._modules, stale))
                yield news
        except BaseException:
            self.machine = None
            raise
        finally:
            if not self._keep and self.machine is not None and not self.loop.busy:
                self.release()

    def release(self) -> None:
        """Give back pages, graphs and copies of weights."""
        self.machine = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _assemble(self, narrow: torch.dtype | None) -> Machine:
        began = perf_counter()
        machine = assemble(self._model, self.settings, self._stats, self._trace, self._ends, narrow)
        self._stats.preparing += perf_counter() - began
        self._weights.refresh()
        machine.loop.scheduler.scope = str(self._weights.number)
        return machine

    def _change_dtype(self) -> None:
        if self.loop.busy:
            raise ValueError("autocast changed while requests run; finish or cancel them first")
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
                self._inside = (autocast_inside(self._model),)
            (dtype,) = self._inside
        return None if dtype is None or dtype == parameter.dtype else dtype

    def _notice_weights(self) -> list[Request]:
        """Forget what other weights computed: cached prefixes, and the keys of running requests."""
        assert self.machine is not None
        if self._weights.moved():
            self.machine.runner.forget_graphs()
        if not self._weights.refresh():
            return []
        news = self.loop.drain()
        scheduler = self.loop.scheduler
        scheduler.restart("the weights changed")
        scheduler.pages.forget()
        scheduler.scope = str(self._weights.number)
        return news
