"""Find the `Layout` of a run from settings, device meshes and models.

    Accelerate's ParallelismConfig, its state, the environment         ┐
    a device mesh: of the user, the strategy, the model's parameters   ├─▶ find_layout ─▶ Layout
    a Transformers model (tp_plan=, distributed_config=)               ┘

All code that assigns packs to ranks calls it. If no model is known, as in a data set, every device
mesh and every sharded Transformers model that is alive in this process counts.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .layout import Axis, Layout
from .ranks import rank, world_size

KINDS = {
    "tensor": ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"),
    "context": ("cp", "context", "context_parallel", "ring"),
    "sequence": ("sp", "sequence", "sequence_parallel", "ulysses"),
    "pipeline": ("pp", "pipe", "pipeline", "pipeline_parallel"),
}
"""The kinds of parallelism inside one replica of a model, and the names of their mesh dimensions.

Expert parallelism is not among them: its ranks read different packs, unless they are also
tensor-parallel ranks.
"""
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_SIZE_NAMES = {kind: f"{names[0]}_size" for kind, names in KINDS.items()}
_MEGATRON = {
    "tensor": "get_tensor_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
}
_WORD = "pass PackedDataset(rank=, world_size=) of the data-parallel group"

Found = tuple[str, int, int | None]
"""A kind of parallelism, its size, and the stride of its ranks if it comes from a mesh."""


def find_layout(
    model: nn.Module | None = None,
    settings: Any = None,
    mesh: DeviceMesh | None = None,
    sequence_parallel: int = 1,
) -> Layout:
    """Return the layout of this process; raise if it is not supported, or contradictory.

    model: the model that is trained, wrapped or not; with neither model nor mesh, all meshes and
        models that are alive count.
    settings: an object with `tp_size`, `cp_size`, `sp_size` or `pp_size`, such as Accelerate's
        `ParallelismConfig`.
    sequence_parallel: number of ranks that share a row; consecutive ranks, unless a mesh says
        otherwise.
    """
    sources = [_named_sizes(settings), _mesh_axes(mesh), _accelerate_sizes()]
    if model is not None:
        sources.append(_model_axes(model))
    elif mesh is None:
        sources.append(_live_axes())
    axes = _merge(item for source in sources for item in source)
    _refuse_unserved(axes)
    tensor = axes.get("tensor", Axis())
    sequence = axes.get("context") or axes.get("sequence")
    if sequence_parallel > 1:
        wanted = Axis(tensor.size if tensor.stride == 1 else 1, sequence_parallel)
        if sequence is not None and sequence.size != sequence_parallel:
            raise ValueError(
                f"sequence_parallel={sequence_parallel}, but the run's settings or meshes say "
                f"{sequence.size}: use the same for both"
            )
        sequence = sequence or wanted
    return Layout(rank(), world_size(), tensor, sequence or Axis())


def data_rank_and_size(
    data_rank: int | None, data_size: int | None, mesh: DeviceMesh | None
) -> tuple[int | None, int | None]:
    """Return the data-parallel rank and size that the user passed, as numbers or as a mesh."""
    if mesh is None:
        return data_rank, data_size
    if data_rank is not None:
        raise ValueError("rank= and device_mesh= both determine the packs to read: pass only one")
    layout = find_layout(mesh=mesh)
    return layout.data_rank, layout.data_size


def is_current(layout: Layout | None) -> bool:
    """Return whether a layout still holds: this process may have joined another group."""
    return layout is not None and (layout.rank, layout.world_size) == (rank(), world_size())


def replica_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the ranks that run one replica of a model together by tensor parallelism, if any do.

    They run every forward together, so they need the same requests in the same order.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    own = getattr(model, "_device_mesh", None)  # of `from_pretrained(tp_plan=)`
    for mesh in [*([] if own is None else [own]), *_meshes(model)]:
        names = mesh.mesh_dim_names
        dims = [name for name in names or () if _KIND_OF.get(name) == "tensor"]
        tensor_mesh = mesh[dims[0]] if dims else mesh
        is_tensor = bool(dims) or (names is None and not _is_fsdp(model))
        if is_tensor and tensor_mesh.size() > 1:
            return tensor_mesh
    return None


def _merge(found: Iterable[Found]) -> dict[str, Axis]:
    """Return one axis per kind; sizes without a mesh have tensor ranks next to each other."""
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}
    for kind, size, stride in found:
        if size == 1:
            continue
        agrees = sizes.setdefault(kind, size) == size
        if not agrees or (stride and strides.setdefault(kind, stride) != stride):
            raise ValueError(
                f"the run's settings, model and meshes contradict each other on {kind} "
                f"parallelism (over {sizes[kind]} and {size} ranks): {_WORD}"
            )
    inner, axes = 1, {}
    for kind in ("tensor", "sequence", "context", "pipeline"):  # Accelerate's order, from inside
        if kind in sizes:
            axes[kind] = Axis(strides.get(kind, inner), sizes[kind])
            inner *= sizes[kind]
    return axes


def _refuse_unserved(axes: dict[str, Axis]) -> None:
    if "pipeline" in axes:
        raise ValueError(
            f"pipeline parallelism over {axes['pipeline'].size} ranks is not supported: a stage "
            "has no loss to scale; use FSDP, tensor or sequence parallelism, or your own loop"
        )
    if {"context", "sequence"} <= set(axes):
        raise ValueError("context and sequence parallelism both split the rows: use one of them")
    megatron = {kind: size for kind, size in _megatron_sizes().items() if size > 1}
    if megatron:
        raise ValueError(
            f"Megatron's model parallelism ({', '.join(megatron)}) is not supported: {_WORD}, and "
            "use your own loop"
        )


def _named_sizes(settings: Any) -> Iterator[Found]:
    """Read `tp_size` and similar settings; a size that is missing or None is 1."""
    for kind, name in _SIZE_NAMES.items():
        size = getattr(settings, name, None)
        if isinstance(size, int):
            yield kind, size, None


def _accelerate_sizes() -> Iterator[Found]:
    """Read Accelerate's state or, before there is one, the environment of `accelerate launch`."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared = getattr(state, "_shared_state", None) or {}
    if "parallelism_config" in shared:
        yield from _named_sizes(shared["parallelism_config"])
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        for kind, name in _SIZE_NAMES.items():
            yield kind, int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}") or 1), None


def _megatron_sizes() -> dict[str, int]:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {kind: getattr(state, name)() for kind, name in _MEGATRON.items()}


def _model_axes(model: nn.Module) -> Iterator[Found]:
    """Read a model's own record of its sharding, and the meshes of its parameters."""
    for module in model.modules():
        yield from _transformers_axes(module)
    for mesh in _meshes(model):
        yield from _mesh_axes(mesh)
        if mesh.mesh_dim_names is None and not _is_fsdp(model):
            yield "tensor", mesh.size(), _stride(mesh, 0)  # sharded, and not by FSDP


def _is_fsdp(model: nn.Module) -> bool:
    return any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


def _meshes(model: nn.Module) -> list[Any]:
    """Return the meshes over which the parameters of a model are distributed."""
    meshes = {id(mesh): mesh for p in model.parameters() if (mesh := _mesh_of(p)) is not None}
    return list(meshes.values())


def _mesh_of(parameter: Any) -> Any:
    return getattr(parameter, "device_mesh", None)


def _transformers_axes(module: nn.Module) -> Iterator[Found]:
    """Read the attributes that `from_pretrained(tp_plan=, distributed_config=)` set on a model."""
    mesh = getattr(module, "_device_mesh", None)
    if mesh is not None:
        yield from _mesh_axes(mesh)
        yield from _named_sizes(
            getattr(getattr(module, "config", None), "distributed_config", None)
        )
    yield "tensor", getattr(module, "_tp_size", None) or 1, None


def _mesh_axes(mesh: Any) -> Iterator[Found]:
    """Return the model-parallel dimensions of a mesh, by their names."""
    for dim, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
        if name in _KIND_OF:
            yield _KIND_OF[name], mesh.size(dim), _stride(mesh, dim)


def _stride(mesh: Any, dim: int) -> int:
    """Return the distance of consecutive ranks along a dimension of a mesh."""
    ranks = mesh.mesh.movedim(dim, -1).flatten(0, -2)[0] if mesh.ndim > 1 else mesh.mesh
    return Axis.of(ranks.tolist()).stride


def _live_axes() -> Iterator[Found]:
    """Search the objects of this process, which takes a fraction of a second."""
    if world_size() == 1:
        return
    # No list has them all: torch registers no meshes, a mesh dimension over all ranks has the
    # unnamed default process group, and a mesh of `tp_plan=` is only known to its model.
    readers: dict[type, Any] = {}  # by type: there are far fewer types than objects
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in readers:
            readers[kind] = _reader_of(kind)
        if readers[kind] is not None:
            yield from readers[kind](thing)


def _reader_of(kind: type) -> Callable[[Any], Iterator[Found]] | None:
    """Return the function that reads the axes of an object of this type; None if it has none."""
    if issubclass(kind, DeviceMesh):
        return _mesh_axes
    return _transformers_axes if issubclass(kind, nn.Module) else None
