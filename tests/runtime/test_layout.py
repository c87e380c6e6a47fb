"""Ranks that share a model are found wherever the layout is written down."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import simulated
import torch
from nopad.packing import PackedDataset
from nopad.runtime import model_parallel_sizes, refuse_model_parallel, replica_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

MESHES = {
    ("dp", "tp"): {"tensor": 2},
    ("data_parallel", "tensor_parallel"): {"tensor": 2},
    ("dp_shard", "cp"): {"context": 2},
    ("dp", "ulysses"): {"sequence": 2},
    ("pp", "dp"): {"pipeline": 2},
    ("pp", "tp"): {"pipeline": 2, "tensor": 2},
    ("dp_replicate", "dp_shard"): {},
    ("efsdp", "ep"): {},
    None: {},
}


def test_a_mesh_tells_by_the_names_of_its_dimensions():
    with simulated.ranks(4):
        for names, sizes in MESHES.items():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            assert model_parallel_sizes(nn.Linear(2, 2), mesh=mesh) == sizes, names


def test_dimensions_of_one_rank_share_nothing():
    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "tp", "pp"))
        assert model_parallel_sizes() == {}
        del mesh


def test_a_model_on_a_mesh_without_names_is_tensor_parallel_unless_fsdp_made_it():
    from torch.distributed.fsdp import fully_shard

    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        assert model_parallel_sizes(model) == {}
        assert model_parallel_sizes(fully_shard(nn.Linear(4, 4), mesh=mesh)) == {}
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        assert model_parallel_sizes(model) == {"tensor": 2}
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
            del model, mesh, found


def test_settings_and_the_launcher_s_environment_tell(monkeypatch):
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    assert model_parallel_sizes(settings=config) == {"context": 2}
    assert model_parallel_sizes(settings=ParallelismConfig(dp_shard_size=4)) == {}
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert model_parallel_sizes() == {}
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert model_parallel_sizes() == {"tensor": 2}
    AcceleratorState._shared_state["parallelism_config"] = config
    assert model_parallel_sizes() == {"context": 2}


def test_megatron_s_state_tells(monkeypatch):
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: 4,
        get_context_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert model_parallel_sizes() == {"tensor": 4, "pipeline": 2}


def test_the_refusal_names_layout_and_way_out():
    model = nn.Linear(2, 2)
    shared = r"tensor parallelism over 2 ranks: PackedX gives.*need the same pack; use DDP or FSDP"
    with pytest.raises(ValueError, match=shared + r".*PackedDataset\(rank=, world_size=\)"):
        refuse_model_parallel("PackedX", model, SimpleNamespace(tp_size=2))
    with pytest.raises(ValueError, match=r"context parallelism.*use DDP or FSDP alone$"):
        refuse_model_parallel("PackedX", model, SimpleNamespace(cp_size=2))
    refuse_model_parallel("PackedX", model, SimpleNamespace(tp_size=1, cp_size=None))


def test_a_data_set_detects_its_rank_among_data_parallel_ranks_only():
    rows = [[1, 2, 3], [4, 5, 6], [7, 8], [9]] * 4
    with simulated.ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        data = PackedDataset(rows, budget=6)
        with pytest.raises(
            ValueError, match=r"tensor parallelism over 2 ranks.*rank=, world_size="
        ):
            next(iter(data))
        own, wanted = (PackedDataset(rows, budget=6, rank=0, world_size=2) for _ in range(2))
        assert next(iter(own)).tokens.tolist() == next(iter(wanted)).tokens.tolist()
        del mesh
    with simulated.ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert next(iter(data)).index == 1  # HSDP: a pack for every rank
        del mesh


def test_a_worker_refuses_too():
    with simulated.ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        data = PackedDataset([[1, 2, 3]] * 4, budget=6)
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
        with pytest.raises(ValueError, match="tensor parallelism over 2 ranks"):
            next(iter(loader))
        del mesh
