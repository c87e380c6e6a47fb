"""Recurrent and convolutional states: find the modules that keep one, and reset it per document.

    row [aaaa|bb|ccc]  ─▶  mixer(aaaa), mixer(bb), mixer(ccc)  ─▶  one row

A state has to start at zero in every document. Kernels that read the boundaries do this
(flash-linear-attention, mamba-ssm, causal-conv1d); the torch code of Transformers does not. So a
probe looks for the modules through which tokens of one document reach another. Where these are
convolutions, zeros between the documents suffice, in one call; other modules run document by
document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..varlen import Varlen, in_backward
from .call_log import recording
from .forward_context import current_varlen, forward_context
from .module_modes import eval_mode, nopad_attention
from .sequence_limits import frozen_rotary
from .state_pool import BOUNDARIES

_PROBE_TOKENS = 8
_CONV1D = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
"""Arguments of torch.conv1d."""


def stateful_modules(model: Any) -> list[nn.Module]:
    """Return the modules of decoder layers that carry a state into the next document of a row.

    Attention is silent in the probe, so that what still passes between tokens is a state.
    """
    if next(model.parameters()).is_meta:
        return []
    try:
        return _leaking(model, packed=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if torch.cuda.is_available() and next(model.parameters()).device.type == "cpu":
            with _on_the_gpu(model):  # flash-linear-attention has no kernels for a CPU
                return stateful_modules(model)
        # Kernels that keep documents apart are not installed: Transformers refuses.
        return _leaking(model, packed=False)


@contextmanager
def _on_the_gpu(model: nn.Module) -> Iterator[None]:
    """Move a model that is on the CPU; its parameters stay the same objects."""
    try:
        model.to("cuda")
        yield
    finally:
        model.to("cpu")


def _leaking(model: Any, packed: bool) -> list[nn.Module]:
    """Run two documents; return the modules in which the second has a gradient in the first.

    packed: pass the boundaries, for kernels that read them.
    """
    device, count = next(model.parameters()).device, 2 * _PROBE_TOKENS
    ids = torch.arange(3, 3 + count, device=device) % model.config.get_text_config().vocab_size
    cu_seqlens = torch.tensor([0, _PROBE_TOKENS, count], dtype=torch.int32, device=device)
    lengths = {"max_length_q": _PROBE_TOKENS, "max_length_k": _PROBE_TOKENS}
    bounds = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, **lengths}
    positions = torch.arange(count, device=device) % _PROBE_TOKENS
    modules = list(model.modules())
    varlen = Varlen(cu_seqlens, _PROBE_TOKENS)
    with (
        forward_context(varlen, model) if packed else nullcontext(),
        _traced_children(model, count) as calls,
        recording(silent=True),
        torch.inference_mode(False),
        torch.enable_grad(),
        eval_mode(model),
        nopad_attention(modules),
        frozen_rotary(modules),
    ):
        inputs = {"input_ids": ids[None].clone(), "position_ids": positions[None]}
        model(**inputs, use_cache=False, **(bounds if packed else {}))
    return [module for module, (x, out) in calls.items() if _reaches_back(x, out)]


def _reaches_back(x: Tensor, out: Tensor) -> bool:
    second = out[:, _PROBE_TOKENS:]
    cotangent = torch.arange(second.numel(), device=out.device).sin().view_as(second)
    (gradient,) = torch.autograd.grad(second, x, cotangent.to(out.dtype), allow_unused=True)
    return gradient is not None and bool(gradient[:, :_PROBE_TOKENS].any())


@contextmanager
def _traced_children(model: Any, tokens: int) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Record input and output of every child of a decoder layer, whose input becomes a leaf."""
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    leaves: dict[nn.Module, Tensor] = {}

    def is_hidden(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.shape[:2] == (1, tokens)

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        names = [name for name, value in kwargs.items() if is_hidden(value)]
        if args and is_hidden(args[0]):
            leaves[module] = args[0].detach().requires_grad_()
            return (leaves[module], *args[1:]), kwargs
        if names:
            leaves[module] = kwargs[names[0]].detach().requires_grad_()
            kwargs = {**kwargs, names[0]: leaves[module]}
        return args, kwargs

    def end(module: nn.Module, args: tuple, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if module in leaves and is_hidden(out) and out.requires_grad:
            calls[module] = leaves[module], out

    handles = []
    for child in (child for layer in decoder_layers(model) for child in layer.children()):
        handles += [
            child.register_forward_pre_hook(begin, with_kwargs=True),
            child.register_forward_hook(end),
        ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model: its list of modules with the most parameters."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    sizes = ((sum(p.numel() for p in layers.parameters()), layers) for layers in lists)
    return list(max(sizes, key=lambda pair: pair[0], default=(0, ()))[1])


@torch.compiler.disable  # a graph would hold for these lengths only
def run_by_document(module: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module on each document of a row, and concatenate; None without boundaries.

    stock: the forward of its class.
    """
    cu_seqlens = _boundaries(module, kwargs)
    if cu_seqlens is None:
        return None
    x = args[0] if args else kwargs["hidden_states"]
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    rows, lengths = x.shape[1], _lengths(cu_seqlens, x.shape[1])
    cut_args = [_split(value, lengths, rows) for value in args]
    cut_kwargs = {name: _split(value, lengths, rows) for name, value in kwargs.items()}
    outputs = [
        stock(module, *(c[i] for c in cut_args), **{k: c[i] for k, c in cut_kwargs.items()})
        for i in range(len(lengths))
    ]
    if not isinstance(outputs[0], tuple):
        return torch.cat(outputs, 1)
    return torch.cat([out[0] for out in outputs], 1), *outputs[0][1:]


def convolve_by_document(module: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module whose convolutions start at zero in every document; None without boundaries."""
    cu_seqlens = _boundaries(module, kwargs)
    if cu_seqlens is None:
        return None
    x = args[0] if args else kwargs["hidden_states"]
    with _DocumentConvolutions(cu_seqlens, x.shape[1]):
        return stock(module, *args, **kwargs)


class _DocumentConvolutions(TorchFunctionMode):
    """Let every causal convolution over a row start at zero in each document."""

    def __init__(self, cu_seqlens: Tensor, tokens: int):
        super().__init__()
        self.row = torch.arange(tokens, device=cu_seqlens.device)
        self.number = torch.searchsorted(cu_seqlens, self.row, right=True)
        self.cu_seqlens = cu_seqlens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        bound = dict(zip(_CONV1D, args, strict=False)) | kwargs
        x, weight = bound.get("input"), bound.get("weight")
        if func is not torch.conv1d or x is None or weight is None or x.shape[-1] != len(self.row):
            return func(*args, **kwargs)
        gap = weight.shape[-1] - 1
        if bound.get("padding") not in (gap, (gap,)):
            return func(*args, **kwargs)
        is_plain = all(bound.get(name, 1) in (1, (1,)) for name in ("stride", "dilation"))
        if is_plain and weight.shape[:2] == (x.shape[1], 1) and torch.compiler.is_compiling():
            return nn.functional.pad(self._sum_taps(x, weight, bound.get("bias")), (0, gap))
        # Uncompiled, a copy with zeros between the documents is faster.
        places = self.row + self.number * gap
        spread = x.new_zeros(*x.shape[:-1], len(self.row) + (len(self.cu_seqlens) + 1) * gap)
        spread[..., places] = x
        out = func(**{**bound, "input": spread})
        return nn.functional.pad(out[..., places], (0, gap))

    def _sum_taps(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
        positions = self.row - self.cu_seqlens[self.number - 1]
        # Tokens first, as in the tensors around it: the products of its gradients are faster.
        out = _DocumentConvolution.apply(x.transpose(1, 2), weight[:, 0], positions)
        return (out if bias is None else out + bias).to(dtype).transpose(1, 2)


class _DocumentConvolution(torch.autograd.Function):
    """y[t, c] = sum over j of weight[c, -1 - j] x[t - j, c], if t - j is in the document of t.

    torch.compile makes one kernel of it.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for back, w, kept in _taps(weight, positions):
            out = out + w * torch.where(kept, _shift(x, back), 0)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, positions = ctx.saved_tensors
        d_x, d_weight = torch.zeros_like(grad), []
        for back, w, kept in _taps(weight, positions):
            seen = torch.where(kept, grad, 0)
            d_weight.append((seen * _shift(x, back)).sum((0, 1)))
            d_x = d_x + w * _shift(seen, -back)
        return d_x.to(x.dtype), torch.stack(d_weight[::-1], 1).to(weight.dtype), None


def _taps(weight: Tensor, positions: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield how far each tap looks back, its weights [C], and which tokens [T, 1] are as far."""
    for back in range(weight.shape[-1]):
        yield back, weight[:, -1 - back].float(), positions[:, None] >= back


def _shift(x: Tensor, by: int) -> Tensor:
    """Return x [B, T, C] with each token some places later, and zeros in the first ones.

    >>> _shift(torch.tensor([[[1], [2], [3]]]), 1).flatten()
    tensor([0, 1, 2])
    """
    if by < 0:
        return nn.functional.pad(x, (0, 0, 0, -by))[:, -by:]
    return nn.functional.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


def _boundaries(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Return where the documents of a row begin, from a module's arguments or the context."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None and (varlen := current_varlen(module)) is not None:
        cu_seqlens = varlen.cu_seqlens
    if cu_seqlens is None and in_backward():
        raise ValueError(
            f"{type(module).__name__} has a state, and its model does not pass the boundaries "
            "of documents to checkpointed layers: train it without gradient checkpointing"
        )
    return cu_seqlens


def pass_boundaries(layer: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose modules do not get its boundaries; None if it has none itself.

    A checkpointed layer is recomputed in the backward, where the context of the model is gone.
    A compiled layer has a context around its graphs, which could not be cut inside of one.
    """
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None or torch.compiler.is_compiling():
        return None
    x = args[0] if args else kwargs["hidden_states"]
    with forward_context(Varlen(cu_seqlens, x.shape[1]), layer):
        return stock(layer, *args, **kwargs)


def _lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Return the lengths of the documents of a row, and of its padding.

    >>> _lengths(torch.tensor([0, 2, 2, 5]), 8)
    [2, 3, 3]
    """
    return [b - a for a, b in pairwise([0, *cu_seqlens.tolist(), tokens]) if b > a]


def _split(value: Any, lengths: list[int], tokens: int) -> list[Any]:
    """Return the part of an argument for each document; what has no token dim is passed as it is.

    >>> [part.tolist() for part in _split(torch.tensor([[1, 2, 3]]), [1, 2], 3)]
    [[[1]], [[2, 3]]]
    """
    if isinstance(value, tuple):
        return list(zip(*(_split(each, lengths, tokens) for each in value), strict=True))
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens:
        return list(value.split(lengths, 1))
    return [value] * len(lengths)
