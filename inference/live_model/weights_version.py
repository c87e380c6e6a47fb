"""`WeightsVersion`: have a model's weights, adapters or forwards changed since the last check?

Cached keys are only valid for the weights that computed them. Most in-place updates raise a
tensor's version counter. Fused optimizers do not, so steps of torch's optimizers are noticed by a
hook. Writes through `.data` do not either, so a checksum over a sample of every tensor is compared.
Adapters, hooks, replaced forwards and plain attributes such as `scaling` change the forward without
changing a tensor, so they are compared as well. PEFT is not imported: its layers are recognized by
a property they all have.

Not noticed are: a write through `.data` that misses all sampled values (a single row, for example);
values that a hook or a replaced forward reads from elsewhere; attributes that are not numbers,
strings or functions; functions replaced in the model's Python module. After such a change, call
`Engine.reset_prefix_cache()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import ceil, gcd
from types import FunctionType, MethodType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_SAMPLES = 64
"""Elements of each tensor in the checksum, at least."""
_NO_COUNTER = -1
"""In place of the version of an inference tensor, which has none."""
_GOLDEN = 0.618034
"""The fraction whose multiples are spread best over the unit interval."""
_KINDS = {bool, int, float, str, tuple, FunctionType, MethodType, partial}
"""Types of attributes that are compared; tensors have version counters, modules are visited."""
_IGNORED = {"training", "gradient_checkpointing", "use_cache", "forward"}
"""Switches of training, which do not change what generation computes; `forward` is compared in
any form."""
_LONGEST_SEEN = "max_seq_len_cached"
"""What a rotary embedding notes of its last forward; the frequencies themselves are tensors."""
OWN_HOOK = "_nopad_hook"
"""Attribute of hooks that the engine itself adds for a call."""

AdapterLayer = Mapping[str, Any]
"""The `vars()` of a layer with adapters: read at every step, so without attribute lookups."""
AdapterState = list[tuple[Any, ...]]
"""For every such layer: adapters disabled, active ones, merged ones, their scales."""


class WeightsVersion:
    """Tell whether a model's weights are still those of the last check."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.number = 0
        self._tensors_seen: list[tuple[Mapping[str, Tensor | None], str, Tensor, int]] = []
        """The dict that holds each tensor, its name there, the tensor and its version counter."""
        self._checksum = 0.0
        self._forward_state: list[Any] = []
        self.forward_changed = False
        """Whether the last `refresh` found other hooks, forwards or attributes."""
        self.moved = False
        """Whether the last `refresh` found a tensor at a new address: graphs hold addresses."""
        self._addresses: list[int] = []
        self._adapter_layers: list[AdapterLayer] = []
        self.adapters: AdapterState = []
        """Which adapters were active at the last check."""
        self._is_stepped = False
        """Whether an optimizer has stepped a parameter since the last check."""
        self.num_steps = 0
        """How often one ever has."""
        hook = partial(_note_step, ref(self))
        finalize(self, register_optimizer_step_post_hook(hook).remove)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in stepped for p in self._model.parameters()):
            self._is_stepped = True
            self.num_steps += 1

    def refresh(self) -> bool:
        """Check all weights; return whether they changed since the last check."""
        modules = list(self._model.modules())
        tensors_seen = [
            (holder, name, tensor, _version(tensor))
            for module in modules
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        distinct = {id(tensor): tensor for _, _, tensor, _ in tensors_seen}
        tensors = [t.to_local() if isinstance(t, DTensor) else t for t in distinct.values()]
        addresses, checksum = [t.data_ptr() for t in tensors], sample_checksum(tensors)
        state, unchanged = forward_state(modules), bool(self._tensors_seen) and self.unchanged()
        self.moved = addresses != self._addresses
        self.forward_changed = state != self._forward_state
        changed = not unchanged or checksum != self._checksum or self.forward_changed
        self._addresses, self._checksum, self._forward_state = addresses, checksum, state
        self._adapter_layers = adapter_layers(modules)
        self.adapters = adapter_state(self._adapter_layers)
        self._tensors_seen, self._is_stepped = tensors_seen, False
        self.number += changed
        return changed

    def forwards_unchanged(self) -> bool:
        """Return whether hooks, forwards and attributes are those of the last check."""
        return forward_state(self._model.modules()) == self._forward_state

    def unchanged(self) -> bool:
        """Return whether tensors, version counters and adapters are those of the last check."""
        if self._is_stepped:
            return False
        for holder, name, tensor, version in self._tensors_seen:  # at every step: a plain loop
            if holder.get(name) is not tensor:
                return False
            if version != _NO_COUNTER and tensor._version != version:
                return False
        return not adapters_changed(self._adapter_layers, self.adapters)


@torch.no_grad()
def sample_checksum(tensors: Iterable[Tensor]) -> float:
    """Sum a sample of every tensor, each element with its own weight."""
    samples, strides = [], dict[torch.Size, int]()  # by shape: a model has few of them
    for tensor in tensors:
        count, shape = tensor.numel(), tensor.shape
        if not count:
            continue
        if (stride := strides.get(shape)) is None:
            stride = strides[shape] = sample_stride(count, shape[-1] if shape else 1)
        flat = tensor if tensor.is_contiguous() else tensor.reshape(-1)
        sample = flat.as_strided((-(-count // stride),), (stride,))
        # 8-bit floats cannot be concatenated with other dtypes; their bytes can.
        samples.append(sample.view(torch.uint8) if sample.itemsize == 1 else sample)
    if not samples:
        return 0.0
    # Autocast may refuse to concatenate several dtypes.
    with torch.autocast(samples[0].device.type, enabled=False):
        values = torch.cat(samples).double()
    order = torch.arange(1, len(values) + 1, device=values.device, dtype=torch.float64)
    return float((values.nan_to_num() * order.sin()).sum())


def sample_stride(count: int, columns: int) -> int:
    """Distance of the samples of a tensor, such that they are spread over rows and columns.

    A sample is a strided view, which costs no kernel. From one to the next, the column moves on by
    the golden section of a row, or of what a row leaves; a stride with a divisor in common with the
    row's length would come back to the same few columns.

    >>> [i * sample_stride(64 * 64, 64) % 64 for i in range(5)]
    [0, 39, 14, 53, 28]
    """
    distance = count / _SAMPLES
    if distance >= columns:
        stride = (int(distance / columns) - 1) * columns + round(_GOLDEN * columns)
    else:
        stride = round(columns / (ceil(columns / distance) + _GOLDEN))
    stride = max(1, stride)
    while gcd(stride, columns) > 1:
        stride -= 1
    return stride


def _note_step(version: ref[WeightsVersion], optimizer: Optimizer, *_: Any) -> None:
    if (noticed := version()) is not None:
        noticed.note_step(optimizer)


def _version(tensor: Tensor) -> int:
    return _NO_COUNTER if tensor.is_inference() else tensor._version


def adapter_layers(modules: Iterable[nn.Module]) -> list[AdapterLayer]:
    """Return the layers that have adapters."""
    modules = list(modules)
    types = {each for each in {type(module) for module in modules} if _has_adapters(each)}
    return [vars(module) for module in modules if type(module) in types]


def adapter_state(layers: Sequence[AdapterLayer]) -> AdapterState:
    """Return which adapters these layers apply, and how strongly."""
    return [tuple(map(_copied, _current(layer))) for layer in layers]


def adapters_changed(layers: Sequence[AdapterLayer], before: AdapterState) -> bool:
    """Return whether the adapters of these layers differ from an earlier state."""
    return any(_current(layer) != then for layer, then in zip(layers, before, strict=True))


def _current(layer: AdapterLayer) -> tuple[Any, ...]:
    get = layer.get
    return get("_disable_adapters"), get("_active_adapter"), get("merged_adapters"), get("scaling")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def _has_adapters(module_type: type[nn.Module]) -> bool:
    # A property in PEFT's layers; Transformers models have a method of the same name.
    return isinstance(getattr(module_type, "disable_adapters", None), property)


def forward_state(modules: Iterable[nn.Module]) -> list[Any]:
    """Return what to compare: two equal states compute the same function of the same tensors."""
    state: list[Any] = [*_global_forward_pre_hooks, *_global_forward_hooks]
    configs: dict[int, Any] = {}
    for module in modules:
        attributes = vars(module)
        state.append(type(module))
        state.append(type(module).forward)
        state.append(attributes.get("forward"))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if hooks:  # their numbers are never used again
                state += [key for key, hook in hooks.items() if not hasattr(hook, OWN_HOOK)]
        state += _plain_attributes(attributes)
        if (config := attributes.get("config")) is not None:
            configs[id(config)] = config
    for config in configs.values():
        state += _plain_attributes(getattr(config, "__dict__", {}))
    return state


def _plain_attributes(attributes: dict[str, Any]) -> list[Any]:
    return [
        pair
        for pair in attributes.items()
        if type(pair[1]) in _KINDS
        and pair[0] not in _IGNORED
        and pair[0][0] != "_"
        and not pair[0].endswith(_LONGEST_SEEN)
    ]
