"""Plan and run cuDNN's attention graphs for packed (ragged) rows: one forward, one backward.

    q, k, v [T, H, D] ─▶ forward ─▶ out [T, H, D], lse [T, H, 1]        lse: log-sum-exp of scores
    grad, q, k, v, out, lse ─▶ backward ─▶ dq, dk, dv

Tokens are contiguous; offsets tell where each sequence starts in each tensor, and lengths how long
it is. Planning takes about a second, so one graph serves every row with at most as many sequences,
tokens, and tokens per sequence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_threads = threading.local()


class RaggedOffsets:
    """How a row is cut into sequences, in the form graphs take; computed once for all layers."""

    def __init__(self, cu_seqlens: Tensor, sequences: int):
        """cu_seqlens: int32 [N + 1]; empty sequences are appended up to `sequences`."""
        missing = sequences + 1 - len(cu_seqlens)
        bounds = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)]).long()
        self.lengths = bounds.diff().int().view(-1, 1, 1, 1)
        """int32, of each sequence."""
        self.backward_done = False
        """Whether a backward used them; the next forward outside of a backward is a new batch."""
        self._bounds = bounds.view(-1, 1, 1, 1)
        self._by_stride: dict[int, Tensor] = {}

    def offsets(self, stride: int) -> Tensor:
        """Where each sequence starts, in elements, and the end last; int64.

        >>> RaggedOffsets(torch.tensor([0, 2, 5]), 3).offsets(10).flatten().tolist()
        [0, 20, 50, 50]
        """
        if stride not in self._by_stride:
            self._by_stride[stride] = self._bounds * stride
        return self._by_stride[stride]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph is planned for."""

    device: torch.device
    dtype: torch.dtype
    sequences: int
    max_length: int
    q: tuple[int, int, int, int]
    """Heads, head dim, token stride and head stride."""
    k: tuple[int, int, int, int]
    v: tuple[int, int, int, int]
    scale: float
    tokens: int = 0
    """Maximum tokens in a row; only the backward needs it."""
    deterministic: bool = False


class Graph:
    """One planned graph; `run` takes its tensors by name."""

    def __init__(self, shape: GraphShape):
        import cudnn

        self.shape = shape
        io_dtypes = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
        self.io_dtype = io_dtypes[shape.dtype]
        self.float32 = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.io_dtype,
            intermediate_data_type=self.float32,
            compute_data_type=self.float32,
            handle=_handle(shape.device),
        )
        self.tensor_names: list[str] = []
        """In the order of their uids, which count from 1."""
        count, dtype = shape.sequences, cudnn.data_type.INT32
        self.causal = {
            "use_padding_mask": True,
            "seq_len_q": self._int_tensor("lengths of q", count, dtype),
            "seq_len_kv": self._int_tensor("lengths of k", count, dtype),
            "attn_scale": shape.scale,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }

    def _new_uid(self, name: str) -> int:
        self.tensor_names.append(name)
        return len(self.tensor_names)

    def _int_tensor(self, name: str, count: int, dtype: Any) -> Any:
        dim, stride, uid = [count, 1, 1, 1], [1, 1, 1, 1], self._new_uid(name)
        return self.graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype, uid=uid)

    def ragged(self, name: str, layout: tuple[int, int, int, int], output: Any = None) -> Any:
        """Declare a tensor [T, heads, head dim]: an input, or the given output of an operation."""
        import cudnn

        heads, head_dim, token_stride, head_stride = layout
        dim = [self.shape.sequences, heads, self.shape.max_length, head_dim]
        stride = [self.shape.max_length * token_stride, head_stride, token_stride, 1]
        dtype = self.float32 if name == "lse" else self.io_dtype
        uid = self._new_uid(name)
        if output is None:
            tensor = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype, uid=uid)
        else:
            tensor = output
            tensor.set_uid(uid).set_output(True)
            tensor.set_dim(dim).set_stride(stride).set_data_type(dtype)
        count = self.shape.sequences + 1
        offsets = self._int_tensor(f"offsets of {name}", count, cudnn.data_type.INT64)
        tensor.set_ragged_offset(offsets)
        return tensor

    def plan(self) -> Graph:
        import cudnn

        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace_bytes = max(1, self.graph.get_workspace_size())
        return self

    def run(self, tensors: dict[str, Tensor], offsets: RaggedOffsets) -> None:
        """Run on the current stream, on rows that are cut as `offsets` says."""
        arguments = [self._argument(name, tensors, offsets) for name in self.tensor_names]
        device, uids = self.shape.device, tuple(range(1, len(arguments) + 1))
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            self.graph.execute(arguments, workspace, handle=_handle(device), tensor_uids=uids)

    @staticmethod
    def _argument(name: str, tensors: dict[str, Tensor], offsets: RaggedOffsets) -> Tensor:
        prefix, _, tensor_name = name.rpartition(" of ")
        if prefix == "lengths":
            return offsets.lengths
        tensor = tensors[tensor_name]
        return offsets.offsets(tensor.stride(0)) if prefix else tensor


@lru_cache(maxsize=64)
def forward_graph(shape: GraphShape) -> Graph:
    """Return the graph of the forward."""
    graph = Graph(shape)
    heads, value_dim = shape.q[0], shape.v[1]
    q, k, v = (graph.ragged("q", shape.q), graph.ragged("k", shape.k), graph.ragged("v", shape.v))
    out, lse = graph.graph.sdpa(q=q, k=k, v=v, generate_stats=True, **graph.causal)
    graph.ragged("out", _contiguous(heads, value_dim), out)
    graph.ragged("lse", _contiguous(heads, 1), lse)
    return graph.plan()


@lru_cache(maxsize=64)
def backward_graph(shape: GraphShape) -> Graph:
    """Return the graph of the backward; the gradients are contiguous."""
    graph = Graph(shape)
    heads, value_dim = shape.q[0], shape.v[1]
    q, k, v = (graph.ragged("q", shape.q), graph.ragged("k", shape.k), graph.ragged("v", shape.v))
    out, grad = (graph.ragged(name, _contiguous(heads, value_dim)) for name in ("out", "grad"))
    lse = graph.ragged("lse", _contiguous(heads, 1))
    gradients = graph.graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=grad, stats=lse,
        max_total_seq_len_q=shape.tokens, max_total_seq_len_kv=shape.tokens,
        use_deterministic_algorithm=shape.deterministic, **graph.causal,
    )  # fmt: skip
    for name, of, gradient in zip("qkv", (shape.q, shape.k, shape.v), gradients, strict=True):
        graph.ragged(f"d{name}", _contiguous(*of[:2]), gradient)
    return graph.plan()


def _contiguous(heads: int, head_dim: int) -> tuple[int, int, int, int]:
    return heads, head_dim, heads * head_dim, head_dim


def _handle(device: torch.device) -> Any:
    """Return this thread's handle, set to the current stream: a backward has its own thread."""
    import cudnn

    handles = vars(_threads).setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]
