"""AdamW that clips on the way: torch's own arithmetic, and torch's own state."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from nopad.trainer.fused import ClippedAdamW


def run(optimizer, weights, steps: int, clip: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in weights:
            p.grad = torch.randn(p.shape, generator=draw)
        if clip:
            torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s)) for s in ((5, 3), (4,))]


def test_clipping_inside_is_clipping_before():
    ours, gold = weights(), weights()
    run(ClippedAdamW(ours, lr=0.1, max_norm=0.5), ours, 3, clip=False)
    run(torch.optim.AdamW(gold, lr=0.1), gold, 3, clip=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, gold, strict=True))


def test_its_state_goes_over_to_torch_and_back():
    ours, gold = weights(), weights()
    first = ClippedAdamW(ours, lr=0.1, max_norm=0.5)
    run(first, ours, 2, clip=False)
    second = torch.optim.AdamW(gold, lr=0.1)
    second.load_state_dict(deepcopy(first.state_dict()))
    first.load_state_dict(deepcopy(second.state_dict()))
    for a, b in zip(ours, gold, strict=True):
        b.data.copy_(a)
    run(first, ours, 2, clip=False)
    run(second, gold, 2, clip=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, gold, strict=True))


@pytest.mark.parametrize("name", ["fused", "capturable", "differentiable"])
def test_what_it_does_not_do_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name}=True.*torch\.optim\.AdamW"):
        ClippedAdamW(weights(), **{name: True})
    with pytest.raises(ValueError, match=f"{name}=True"):
        ClippedAdamW([{"params": weights(), name: True}])


def test_without_gradients_nothing_moves():
    ours = weights()
    ClippedAdamW(ours).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, weights(), strict=True))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def fsdp1(flat: bool) -> list[torch.nn.Parameter]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 3), use_orig_params=not flat, device_id=torch.device("cpu")
    )
    model(torch.ones(2, 4)).sum().backward()
    return list(model.parameters())


@pytest.mark.parametrize("flat", [False, True])
def test_a_piece_of_the_gradient_under_fsdp1_is_refused(process_group, monkeypatch, flat):
    ours = fsdp1(flat)
    before = [p.detach().clone() for p in ours]
    monkeypatch.setattr("nopad.trainer.fused.adamw.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"FSDP1 and DeepSpeed.*NO_SHARD.*their own clipping"):
        ClippedAdamW(ours).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.parametrize("flat", [False, True])
def test_one_process_under_fsdp1_has_the_whole_gradient(process_group, flat):
    ours, theirs = fsdp1(flat), fsdp1(flat)
    ClippedAdamW(ours, max_norm=0.5).step()
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.optim.AdamW(theirs).step()
    for mine, stock in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, stock)


def test_a_piece_of_the_gradient_under_zero_3_is_refused():
    ours = weights()
    ours[0].grad, ours[0].ds_id = torch.ones(5, 3), 0  # as DeepSpeed marks what it has sharded
    with pytest.raises(ValueError, match="FSDP1 and DeepSpeed"):
        ClippedAdamW(ours).step()
