"""The layout of a run is found wherever it is written down, and says who reads which packs."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import simulated
import torch
from nopad.packing import PackedDataset
from nopad.runtime import Axis, Layout, find_layout, replica_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

MESHES = {
    ("dp", "tp"): (Axis(1, 2), Axis()),
    ("tp", "dp"): (Axis(2, 2), Axis()),
    ("data_parallel", "tensor_parallel"): (Axis(1, 2), Axis()),
    ("dp_shard", "cp"): (Axis(), Axis(1, 2)),
    ("ulysses", "dp"): (Axis(), Axis(2, 2)),
    ("sp", "tp"): (Axis(1, 2), Axis(2, 2)),
    ("dp_replicate", "dp_shard"): (Axis(), Axis()),
    ("efsdp", "ep"): (Axis(), Axis()),
    None: (Axis(), Axis()),
}


@pytest.fixture(autouse=True)
def no_accelerate_state(monkeypatch):
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(AcceleratorState, "_shared_state", {})


def test_replicas_are_numbered_whatever_the_order_of_the_dimensions():
    sizes = {"data": 3, "tensor": 2, "sequence": 2}
    for order in (("data", "sequence", "tensor"), ("tensor", "data", "sequence")):
        strides = dict.fromkeys(order, 0)
        stride = 1
        for name in reversed(order):
            strides[name], stride = stride, stride * sizes[name]
        for place in product(*(range(sizes[name]) for name in order)):
            at = dict(zip(order, place, strict=True))
            rank = sum(at[name] * strides[name] for name in order)
            layout = Layout(rank, 12, Axis(strides["tensor"], 2), Axis(strides["sequence"], 2))
            assert (layout.data_rank, layout.data_size) == (at["data"], 3)
            assert layout.sequence.index(rank) == at["sequence"]
            assert layout.tensor.group(rank)[at["tensor"]] == rank


def test_a_mesh_tells_by_the_names_of_its_dimensions():
    with simulated.ranks(4, rank=3):
        for names, axes in MESHES.items():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            layout = find_layout(mesh=mesh)
            assert (layout.tensor, layout.sequence) == axes, names


def test_dimensions_of_one_rank_share_nothing():
    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "tp", "pp"))
        assert find_layout() == Layout(0, 2)
        del mesh


def test_a_mesh_without_names_is_tensor_parallel_unless_of_fsdp():
    from torch.distributed.fsdp import fully_shard

    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        assert find_layout(model).data_size == 2
        assert find_layout(fully_shard(nn.Linear(4, 4), mesh=mesh)).data_size == 2
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        assert find_layout(model) == Layout(0, 2, tensor=Axis(1, 2))
        del model, mesh


def test_the_ranks_of_one_replica_are_those_of_the_tensor_dimension():
    from torch.distributed.fsdp import fully_shard

    model, plan = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": ColwiseParallel()}
    assert replica_mesh(model) is None
    for names, ranks in ((("dp", "tp"), [2, 3]), (("tp", "dp"), [1, 3])):
        with simulated.ranks(4, rank=3):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            assert replica_mesh(fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])) is None
            model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], plan)
            found = replica_mesh(model)
            assert found is not None and found.mesh.tolist() == ranks
            assert find_layout(model).tensor.group(3) == ranks
            del model, mesh, found


def test_settings_and_the_launcher_s_environment_tell(monkeypatch):
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    with simulated.ranks(4):
        assert find_layout(settings=config).sequence == Axis(1, 2)
        assert find_layout(settings=ParallelismConfig(dp_shard_size=4)) == Layout(0, 4)
        monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
        assert find_layout() == Layout(0, 4)
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        assert find_layout().tensor == Axis(1, 2)
        AcceleratorState._shared_state["parallelism_config"] = ParallelismConfig(
            tp_size=2, cp_size=2, dp_shard_size=1
        )
        assert find_layout() == Layout(0, 4, Axis(1, 2), Axis(2, 2))


def test_sequence_parallel_takes_consecutive_ranks():
    with simulated.ranks(8, rank=5):
        assert find_layout(sequence_parallel=4).sequence.group(5) == [4, 5, 6, 7]
        layout = find_layout(settings=SimpleNamespace(tp_size=2), sequence_parallel=2)
        assert (layout.sequence.group(5), layout.data_rank) == ([5, 7], 1)
        with pytest.raises(ValueError, match=r"sequence_parallel=2, but .* say 4"):
            find_layout(settings=SimpleNamespace(cp_size=4), sequence_parallel=2)
        with pytest.raises(ValueError, match="sequence parallelism over 3 ranks does not divide"):
            find_layout(sequence_parallel=3)


def test_layouts_that_are_not_served_are_refused_with_the_reason(monkeypatch):
    model = nn.Linear(2, 2)
    with simulated.ranks(4):
        with pytest.raises(ValueError, match="pipeline parallelism over 2 ranks is not supported"):
            find_layout(model, SimpleNamespace(pp_size=2))
        with pytest.raises(ValueError, match="both split the rows"):
            find_layout(model, SimpleNamespace(cp_size=2, sp_size=2))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"contradict .* on tensor .*\(over 2 and 4 ranks\)"):
            find_layout(model, SimpleNamespace(tp_size=2), mesh)
    with pytest.raises(ValueError, match="over 2 ranks does not divide the run's 1 ranks"):
        find_layout(model, SimpleNamespace(tp_size=2))
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: 4,
        get_context_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    with pytest.raises(ValueError, match=r"Megatron's .* \(tensor, pipeline\).*rank=, world_size="):
        find_layout(model)


def test_a_data_set_reads_the_packs_of_its_replica():
    rows = [[1, 2, 3], [4, 5, 6], [7, 8], [9]] * 4
    data = PackedDataset(rows, budget=6)
    for rank in range(4):
        with simulated.ranks(4, rank=rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            assert next(iter(data)).index == rank // 2
            assert PackedDataset(rows, budget=6, device_mesh=mesh).ranks() == (rank // 2, 2)
            told = PackedDataset(rows, budget=6, rank=1, world_size=4)
            assert next(iter(told)).index == 1
            del mesh
    with simulated.ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert next(iter(data)).index == 1  # HSDP: a pack for every rank
        del mesh


def test_a_worker_reads_the_packs_of_its_replica():
    with simulated.ranks(4, rank=2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        data = PackedDataset([[1, 2, 3]] * 8, budget=6)
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
        assert next(iter(loader)).index == 1
        del mesh
