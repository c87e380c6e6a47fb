"""Tensor, context, sequence and pipeline parallelism: the ranks that must read the same packs.

    world of 4, mesh (dp 2, tp 2)      ranks 0 1 | 2 3      one replica of the model on two ranks
    data parallel only                 ranks 0 | 1 | 2 | 3  one replica each: a pack for every rank

Everything that gives packs to ranks asks here. A layout is read from Accelerate's and Megatron's
state and from the model. Where no model is known, as in a data set, every device mesh and every
sharded Transformers model that is alive in this process counts: a mesh is registered nowhere.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

KINDS = {
    "tensor": ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"),
    "context": ("cp", "context", "context_parallel", "ring"),
    "sequence": ("sp", "sequence", "sequence_parallel", "ulysses"),
    "pipeline": ("pp", "pipe", "pipeline", "pipeline_parallel"),
}
"""The kinds of parallelism inside one replica of a model, and what their mesh dimensions are named.

Expert parallelism is not among them: its ranks read packs of their own.
"""
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_SIZE_NAMES = {kind: f"{names[0]}_size" for kind, names in KINDS.items()}
_MEGATRON = {
    "tensor": "get_tensor_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
}


def model_parallel_sizes(
    model: nn.Module | None = None, settings: Any = None, mesh: DeviceMesh | None = None
) -> dict[str, int]:
    """Return the kinds of model parallelism in use and their sizes; empty if ranks share no model.

    model: the model that is trained, wrapped or not; without it, whatever is alive counts.
    settings: an object with `tp_size`, `cp_size`, `sp_size` or `pp_size`, such as Accelerate's
        `ParallelismConfig`.
    """
    found: dict[str, int] = {}
    by_model = _live_sizes() if model is None else _model_sizes(model)
    known = _named_sizes(settings), _mesh_sizes(mesh), _accelerate_sizes(), _megatron_sizes()
    for sizes in (*known, *by_model):
        for kind, size in sizes.items():
            if size > 1:
                found[kind] = max(size, found.get(kind, 1))
    return found


def refuse_model_parallel(
    front_end: str, model: nn.Module, settings: Any = None, mesh: DeviceMesh | None = None
) -> None:
    """Raise if ranks share the model: a front end would give them different packs."""
    sizes = model_parallel_sizes(model, settings, mesh)
    if not sizes:
        return
    way_out = "use DDP or FSDP alone"
    if not {"context", "sequence"} & set(sizes):
        way_out += (
            ", or a loop of your own with PackedDataset(rank=, world_size=) of the data-parallel "
            "group"
        )
    raise ValueError(
        f"{describe_layout(sizes)}: {front_end} gives every rank packs of its own, but ranks that "
        f"share a model need the same pack; {way_out}"
    )


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


def describe_layout(sizes: dict[str, int]) -> str:
    """Name the kinds of parallelism and their sizes.

    >>> describe_layout({"tensor": 2, "pipeline": 4})
    'tensor parallelism over 2 ranks and pipeline parallelism over 4 ranks'
    """
    return " and ".join(f"{kind} parallelism over {size} ranks" for kind, size in sizes.items())


def _named_sizes(settings: Any) -> dict[str, int]:
    """Read `tp_size` and its like; a size that is missing or None is 1."""
    sizes = {kind: getattr(settings, name, None) for kind, name in _SIZE_NAMES.items()}
    return {kind: size for kind, size in sizes.items() if isinstance(size, int)}


def _accelerate_sizes() -> dict[str, int]:
    """Read Accelerate's state or, before there is one, the environment of `accelerate launch`."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared = getattr(state, "_shared_state", None) or {}
    if "parallelism_config" in shared:
        return _named_sizes(shared["parallelism_config"])
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return {}
    names = {kind: f"PARALLELISM_CONFIG_{name.upper()}" for kind, name in _SIZE_NAMES.items()}
    return {kind: int(os.environ.get(name) or 1) for kind, name in names.items()}


def _megatron_sizes() -> dict[str, int]:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {kind: getattr(state, name)() for kind, name in _MEGATRON.items()}


def _model_sizes(model: nn.Module) -> Iterator[dict[str, int]]:
    """Read a model's own record of its sharding, and the meshes of its parameters."""
    for module in model.modules():
        yield _transformers_sizes(module)
    for mesh in _meshes(model):
        yield _mesh_sizes(mesh)
        if mesh.mesh_dim_names is None and not _is_fsdp(model):
            yield {"tensor": mesh.size()}  # sharded, and not by FSDP


def _is_fsdp(model: nn.Module) -> bool:
    return any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


def _meshes(model: nn.Module) -> list[Any]:
    """Return the meshes over which the parameters of a model are distributed."""
    meshes = {id(mesh): mesh for p in model.parameters() if (mesh := _mesh_of(p)) is not None}
    return list(meshes.values())


def _transformers_sizes(module: nn.Module) -> dict[str, int]:
    """Read the sizes that `from_pretrained(tp_plan=, distributed_config=)` has left on a model."""
    settings = getattr(getattr(module, "config", None), "distributed_config", None)
    sizes = {} if getattr(module, "_device_mesh", None) is None else _named_sizes(settings)
    return {**sizes, "tensor": getattr(module, "_tp_size", None) or 1}


def _mesh_of(parameter: Any) -> Any:
    return getattr(parameter, "device_mesh", None)


def _mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the sizes of the model-parallel dimensions of a mesh, by their names."""
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return {_KIND_OF[name]: mesh.size(d) for d, name in enumerate(names) if name in _KIND_OF}


def _live_sizes() -> Iterator[dict[str, int]]:
    """Look through the objects of this process, which takes a fraction of a second."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    readers: dict[type, Any] = {}  # by type: there are far fewer types than objects
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in readers:
            readers[kind] = _reader_of(kind)
        if readers[kind] is not None:
            yield readers[kind](thing)


def _reader_of(kind: type) -> Callable[[Any], dict[str, int]] | None:
    """Return what reads the sizes of an object of this type; None if it has none."""
    if issubclass(kind, DeviceMesh):
        return _mesh_sizes
    return _transformers_sizes if issubclass(kind, nn.Module) else None
