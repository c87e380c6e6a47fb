"""Graphs of cuDNN for ragged rows, each planned once: one for attending, one for the gradients.

    q, k, v [T, H, D] ─▶ attend ─▶ out [T, H, D], sums [T, H, 1]         sums: of exponents, logged
    grad, q, k, v, out, sums ─▶ gradients ─▶ d q, d k, d v

Tokens lie one after the other; where each sequence begins in each tensor is told by offsets, and
how long it is by lengths. Planning takes about a second, so a graph holds for every row of at most
as many sequences, tokens, and tokens a sequence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_threads = threading.local()


class Ragged:
    """How a row is cut, as graphs are told: made once for all layers."""

    def __init__(self, bounds: Tensor, sequences: int):
        """bounds: int32 [N + 1], to which empty sequences are added up to `sequences`."""
        added = sequences + 1 - len(bounds)
        bounds = torch.cat([bounds, bounds[-1:].expand(added)]).long()
        self.lengths = bounds.diff().int().view(-1, 1, 1, 1)
        """int32, of each sequence."""
        self._bounds = bounds.view(-1, 1, 1, 1)
        self._offsets: dict[int, Tensor] = {}

    def offsets(self, stride: int) -> Tensor:
        """Where each sequence begins, in elements; int64, and the end last.

        >>> Ragged(torch.tensor([0, 2, 5]), 3).offsets(10).flatten().tolist()
        [0, 20, 50, 50]
        """
        if stride not in self._offsets:
            self._offsets[stride] = self._bounds * stride
        return self._offsets[stride]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is planned for."""

    device: torch.device
    dtype: torch.dtype
    sequences: int
    longest: int
    q: tuple[int, int, int, int]
    """Heads, width, and the strides of a token and a head."""
    k: tuple[int, int, int, int]
    v: tuple[int, int, int, int]
    scale: float
    tokens: int = 0
    """At most so many in a row; asked for by the backward."""
    deterministic: bool = False


class Graph:
    """One planned graph: give it tensors by their names."""

    def __init__(self, shape: Shape):
        import cudnn

        self.shape = shape
        self.kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
        self.wide = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.kind[shape.dtype],
            intermediate_data_type=self.wide,
            compute_data_type=self.wide,
            handle=_handle(shape.device),
        )
        self.places: list[str] = []
        """The names of its tensors: one's number is its place, counted from 1."""
        count, dtype = shape.sequences, cudnn.data_type.INT32
        self.causal = {
            "use_padding_mask": True,
            "seq_len_q": self._numbers("lengths of q", count, dtype),
            "seq_len_kv": self._numbers("lengths of k", count, dtype),
            "attn_scale": shape.scale,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }

    def _number(self, name: str) -> int:
        self.places.append(name)
        return len(self.places)

    def _numbers(self, name: str, count: int, dtype: Any) -> Any:
        dim, stride, uid = [count, 1, 1, 1], [1, 1, 1, 1], self._number(name)
        return self.graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype, uid=uid)

    def ragged(self, name: str, layout: tuple[int, int, int, int], made: Any = None) -> Any:
        """A tensor [T, heads, width], taken in, or handed out where an operation made it."""
        import cudnn

        heads, width, token, head = layout
        dim = [self.shape.sequences, heads, self.shape.longest, width]
        stride = [self.shape.longest * token, head, token, 1]
        dtype = self.wide if name == "sums" else self.kind[self.shape.dtype]
        uid = self._number(name)
        if made is None:
            made = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype, uid=uid)
        else:
            made.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
        count = self.shape.sequences + 1
        made.set_ragged_offset(self._numbers(f"offsets of {name}", count, cudnn.data_type.INT64))
        return made

    def plan(self) -> Graph:
        import cudnn

        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.room = max(1, self.graph.get_workspace_size())
        return self

    def run(self, tensors: dict[str, Tensor], ragged: Ragged) -> None:
        """Run it on the current stream, on rows that are cut like this."""
        given = [self._given(name, tensors, ragged) for name in self.places]
        device, numbers = self.shape.device, range(1, len(given) + 1)
        room = torch.empty(self.room, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            self.graph.execute(given, room, handle=_handle(device), tensor_uids=tuple(numbers))

    @staticmethod
    def _given(name: str, tensors: dict[str, Tensor], ragged: Ragged) -> Tensor:
        what, _, whose = name.rpartition(" of ")
        if what == "lengths":
            return ragged.lengths
        return ragged.offsets(tensors[whose].stride(0)) if what else tensors[whose]


@lru_cache(maxsize=64)
def attend(shape: Shape) -> Graph:
    """The graph of the forward."""
    graph = Graph(shape)
    heads, width = shape.q[0], shape.v[1]
    q, k, v = (graph.ragged(name, getattr(shape, name)) for name in "qkv")
    out, sums = graph.graph.sdpa(q=q, k=k, v=v, generate_stats=True, **graph.causal)
    graph.ragged("out", _packed(heads, width), out)
    graph.ragged("sums", _packed(heads, 1), sums)
    return graph.plan()


@lru_cache(maxsize=64)
def gradients(shape: Shape) -> Graph:
    """The graph of the backward; its gradients are packed."""
    graph = Graph(shape)
    heads, width = shape.q[0], shape.v[1]
    q, k, v = (graph.ragged(name, getattr(shape, name)) for name in "qkv")
    out, grad = (graph.ragged(name, _packed(heads, width)) for name in ("out", "grad"))
    sums = graph.ragged("sums", _packed(heads, 1))
    made = graph.graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=grad, stats=sums,
        max_total_seq_len_q=shape.tokens, max_total_seq_len_kv=shape.tokens,
        use_deterministic_algorithm=shape.deterministic, **graph.causal,
    )  # fmt: skip
    for name, gradient in zip("qkv", made, strict=True):
        graph.ragged(f"d {name}", _packed(*getattr(shape, name)[:2]), gradient)
    return graph.plan()


def _packed(heads: int, width: int) -> tuple[int, int, int, int]:
    return heads, width, heads * width, width


def _handle(device: torch.device) -> Any:
    """This thread's handle, on the current stream: backwards have a thread of their own."""
    import cudnn

    handles = vars(_threads).setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]
