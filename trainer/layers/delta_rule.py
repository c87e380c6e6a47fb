"""The gated delta rule of a compiled layer as one operator, which torch.compile does not trace.

    mixer ─▶ its own forward ─▶ torch_chunk_gated_delta_rule: the operator, around the same function

The function of Transformers runs the kernels of flash-linear-attention, which read the boundaries
of documents and would cut the graph of the layer in two. The backward runs it a second time: only
its inputs are kept, which a compiled layer recomputes from its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import global_of, stock_class

RULE = "torch_chunk_gated_delta_rule"


def trace_as_operator(module: nn.Module) -> None:
    """Let torch.compile see the delta rule of a mixer, if it has one, as one operator."""
    stock = inspect.unwrap(stock_class(module).forward)
    function = global_of(stock, RULE)
    if function is not None:
        _substitute(function, stock.__module__)


@cache
def _substitute(function: Any, source: str) -> None:
    """Let graphs call the operator in place of a function that `source` defines."""
    stateful: Any = torch.compiler.disable(function)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        keeps_state = kwargs.get("initial_state") is not None or kwargs.get("output_final_state")
        if keeps_state:  # in generation
            kwargs |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
            return stateful(query, key, value, g=g, beta=beta, **kwargs)
        # Written so by the kernels before: flash-linear-attention would copy parts of a tensor.
        q, k, v, decay, beta = (x.contiguous() for x in (query, key, value, g, beta))
        normalize = use_qk_l2norm_in_kernel
        return _gated_delta_rule(q, k, v, decay, beta, cu_seqlens, normalize, source), None


@torch.library.custom_op("nopad::gated_delta_rule", mutates_args=())
def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    normalize: bool,
    source: str,
) -> Tensor:
    """Run the function that the file `source` of Transformers has for it."""
    return _run([q, k, v, decay, beta], cu_seqlens, normalize, source)


@_gated_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(v.shape)


@torch.library.custom_op("nopad::gated_delta_rule_backward", mutates_args=())
def _gated_delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    normalize: bool,
    source: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v, decay, beta)]
    with _autograd():
        out = _run(inputs, cu_seqlens, normalize, source)
        gradients = torch.autograd.grad(out, inputs, grad)
    dq, dk, dv, d_decay, d_beta = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv, d_decay, d_beta


@_gated_delta_rule_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.normalize, ctx.source = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> Any:
    options = ctx.normalize, ctx.source
    gradients = _gated_delta_rule_backward(grad.contiguous(), *ctx.saved_tensors, *options)
    return *gradients, None, None, None


_gated_delta_rule.register_autograd(_backward, setup_context=_save)


def _run(inputs: list[Tensor], cu_seqlens: Tensor | None, normalize: bool, source: str) -> Tensor:
    q, k, v, decay, beta = inputs
    options = {"use_qk_l2norm_in_kernel": normalize, "cu_seqlens": cu_seqlens}
    out, _ = getattr(sys.modules[source], RULE)(q, k, v, g=decay, beta=beta, **options)
    return out.contiguous()


@contextmanager
def _autograd() -> Iterator[None]:
    """Record gradients inside of an operator, where PyTorch's dispatcher has no autograd."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ForceDispatchKeyGuard(include, exclude - autograd), torch.enable_grad():
        yield
