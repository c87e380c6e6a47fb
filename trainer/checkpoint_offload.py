"""`offload_checkpoints`: gradient checkpointing with the layer inputs kept in host memory.

    forward    layer 0 ─▶ layer 1 ─▶ ... ─▶ layer n   an input is copied out while its layer runs
    backward   layer 0 ◀─ layer 1 ◀─ ... ◀─ layer n   the next one is copied in meanwhile

Gradient checkpointing keeps one [T, hidden] per layer; with long rows, these take most of the
memory. The copies run on a separate stream, so a step takes no longer if computing a layer takes
longer than copying its input; both times grow with T.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import unwrap_peft

MIN_BYTES = 1 << 20
"""Smaller tensors stay: a copy would cost more than it frees."""
KEPT = 2
"""Tensors that stay on the device while they are copied."""


def offload_checkpoints(model: Any) -> None:
    """Keep the layer inputs of a causal LM with gradient checkpointing in pinned host memory.

    Losses and gradients stay the same to the bit. Call it once, before or after checkpointing is
    enabled and before the model is wrapped:

        offload_checkpoints(model)
        PackedTrainer(model, TrainingArguments("out", gradient_checkpointing=True), ...)

    The host needs layers x T x hidden size x 4 bytes under autocast (2 in a bf16 model).

    Args:
        model: a Transformers causal LM, with or without PEFT's adapters.
    """
    decoder = unwrap_peft(model).get_decoder()
    if getattr(decoder, "nopad_offload", None) is None:
        decoder.nopad_offload = _Offload()
        decoder.nopad_offload.register(decoder)


class _Offload:
    """Hooks around the forward of one decoder."""

    def __init__(self) -> None:
        self._leaving: deque[_HostTensor] = deque()
        """Tensors whose copies may not be finished; the originals are kept until then."""
        self._last: _HostTensor | None = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def register(self, decoder: nn.Module) -> None:
        decoder.register_forward_pre_hook(self._enter)
        decoder.register_forward_hook(self._leave, always_call=True)

    def _enter(self, decoder: Any, _: Any) -> None:
        if not (decoder.training and torch.is_grad_enabled()):
            return
        if not decoder.is_gradient_checkpointing:
            raise ValueError(
                "offload_checkpoints keeps the inputs of checkpointed layers, but gradient "
                "checkpointing is off: call model.gradient_checkpointing_enable()"
            )
        self._leaving.clear()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = self._last = None

    def _pack(self, tensor: Tensor) -> Tensor | _HostTensor:
        stays = isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
        if stays or tensor.nbytes < MIN_BYTES:
            return tensor
        self._last = _HostTensor(tensor.detach(), self._stream(tensor.device), self._last)
        self._leaving.append(self._last)
        if len(self._leaving) > KEPT:
            self._leaving.popleft().release()
        return self._last

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

    def __deepcopy__(self, memo: dict) -> _Offload:
        copied = memo[id(self)] = type(self)()  # the copied decoder's hooks are this one's methods
        return copied


def _unpack(saved: Tensor | _HostTensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.fetch()


class _HostTensor:
    """A tensor in host memory, and the one saved before it, which the backward needs next.

    The streams wait for each other on the device, and the host never waits: memory is allocated and
    freed in the order of the main stream, however far the host runs ahead.
    """

    def __init__(
        self, tensor: Tensor, stream: torch.cuda.Stream | None, before: _HostTensor | None
    ):
        self._device, self._stream, self._before = tensor.device, stream, before
        self._on_device: Tensor | None = tensor
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copied = self._copy(self._host, tensor)

    def release(self) -> None:
        """Free the tensor on the device; later work there waits for the copy to the host."""
        self._wait()
        self._on_device = None

    def fetch(self) -> Tensor:
        """Return the tensor on its device, and start to copy the one before it."""
        self._start()
        if self._before is not None:
            self._before._start()
        self._wait()
        fetched, self._on_device = self._on_device, None
        assert fetched is not None
        return fetched

    def _start(self) -> None:
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._on_device, self._host)

    def _copy(self, to: Tensor, tensor: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            to.copy_(tensor)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
