"""`nopad doctor --distributed`: do packs, losses and generation agree across the ranks of a run?

Run it under any launcher, on the machines that will train. It trains a tiny Llama in float32 for a
few steps in each layout, and compares them with the same steps computed by every rank alone. Rank 0
prints a table; the exit status is 1 on every rank if a check fails on one of them.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..collators import PackedCollator
from ..inference import DataParallelEngine, Engine, SamplingParams
from ..packing import IGNORE_INDEX, Pack, PackedDataset
from ..runtime import (
    Axis,
    Layout,
    all_ranks_or_none,
    destroy_group,
    gather_objects,
    join_sequence_group,
    rank,
    world_size,
)
from ..trainer import DataState, PackedLoader, attach_loss

STEPS, BUDGET, VOCAB_SIZE, NUM_HEADS = 3, 256, 256, 8
LEARNING_RATE = 0.5
TOLERANCE = 1e-4
"""Relative difference of losses and gradients that float32 may have."""
TIMEOUT = timedelta(seconds=60)
"""A rank that cannot reach the others gives up after this time."""


class Disagreement(ValueError):
    """A fault that a check found."""


class Skip(Exception):
    """The reason why a check does not apply to this number of ranks."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one check on all ranks."""

    name: str
    faults: dict[int, str]
    note: str
    seconds: float
    was_skipped: bool = False

    def __str__(self) -> str:
        if self.was_skipped:
            return f"{self.name:<12} skipped {self.note}"
        if not self.faults:
            return f"{self.name:<12} ok      {self.note} ({self.seconds:.1f} s)"
        first = min(self.faults)
        others = f" and {len(self.faults) - 1} more" * (len(self.faults) > 1)
        return f"{self.name:<12} WRONG   rank {first}{others}: {self.faults[first]}"


def main() -> int:
    """Run all checks on every rank; return the exit status."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "--distributed compares the ranks of a launcher, but there is one process: "
            "torchrun --nproc-per-node 2 -m nopad doctor --distributed"
        )
    with _process_group() as device:
        rows = [_run(name, check, device) for name, check in CHECKS.items()]
        if rank() == 0:
            print("\n".join([_title(device), *map(str, rows), _verdict(rows)]), flush=True)
        status = int(any(row.faults for row in rows))
    return status


@contextmanager
def _process_group() -> Iterator[torch.device]:
    """Join the launcher's ranks; yield the device of this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield device
    finally:
        destroy_group()


def _run(name: str, check: Callable[[torch.device], str], device: torch.device) -> Row:
    """Run one check on all ranks and gather what each found."""
    start = time.perf_counter()

    def outcome() -> tuple[str, str | None]:
        try:
            return check(device), None
        except ValueError as fault:  # also of nopad's own checks
            return "", str(fault)

    try:
        results = all_ranks_or_none(outcome)
    except Skip as reason:
        return Row(name, {}, str(reason), 0.0, was_skipped=True)
    faults = {number: fault for number, (_, fault) in enumerate(results) if fault is not None}
    return Row(name, faults, results[0][0], time.perf_counter() - start)


def _title(device: torch.device) -> str:
    return f"{world_size()} ranks, {dist.get_backend()}, {device.type}, torch {torch.__version__}"


def _verdict(rows: list[Row]) -> str:
    bad = [row.name for row in rows if row.faults]
    if bad:
        return f"Do not train on these ranks before this is fixed: {', '.join(bad)}."
    return "All ranks agree."


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise Disagreement(fault)


# Checks: each runs on every rank, returns a note, or raises a Disagreement after all collectives.


def check_ranks(device: torch.device) -> str:
    """Compare versions, and count the machines and the processes of each device."""
    from .. import __version__

    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    own = {"nopad": __version__, "torch": torch.__version__, "device": device_name}
    hosts = gather_objects((platform.node(), str(device), own))
    total = torch.full((), float(rank() + 1), device=device)
    dist.all_reduce(total)
    for number, (_, _, other) in enumerate(hosts):
        _require(other == own, f"it has {own}, rank {number} has {other}")
    used = [(host, place) for host, place, _ in hosts]
    shared = device.type == "cuda" and used.count(used[rank()]) > 1
    _require(not shared, f"several ranks use {device} of {used[rank()][0]}: one GPU for each rank")
    expected = world_size() * (world_size() + 1) / 2
    _require(total.item() == expected, f"the sum of all ranks is {total.item()}, not {expected}")
    machines = len({host for host, *_ in hosts})
    return f"{machines} machine{'s' * (machines > 1)}, {own['device']}"


def check_packs(device: torch.device) -> str:
    """Compare the packs that all ranks read with those that one rank would read alone."""
    loader = _loader(_data_parallel(), count_items=False)
    own = [(loader.last_pack.index, _digest(batch)) for batch in loader if loader.last_pack]
    everyone = sorted(pack for packs in gather_objects(own) for pack in packs)
    alone = PackedCollator()
    expected = [(pack.index, _digest(alone(pack))) for pack in _dataset(0, 1)]
    found = [pack for pack in everyone if pack[0] < len(expected)]  # then come empty packs
    _require(
        found == expected,
        f"{len(found)} packs were read by all ranks, {len(set(found) & set(expected))} of them "
        f"right: one rank alone reads {len(expected)}; is the data the same on every rank?",
    )
    return f"{len(expected)} packs, each read by one rank"


def check_resume(device: torch.device) -> str:
    """Stop after a step, load the merged state in a new loader, and compare the rest."""
    layout = _data_parallel()
    whole = [batch["input_ids"] for batch in _loader(layout, count_items=False)]
    stopped = _loader(layout, count_items=False)
    first = [batch["input_ids"] for batch in islice(stopped, STEPS)]
    state = DataState(stopped).state_dict()
    resumed = _loader(layout, count_items=False)
    DataState(resumed).load_state_dict(state)
    rest = [batch["input_ids"] for batch in resumed]
    same = len(first) + len(rest) == len(whole) and all(map(torch.equal, [*first, *rest], whole))
    _require(same, f"{len(first)} batches before and {len(rest)} after are not the {len(whole)}")
    return f"{len(rest)} of {len(whole)} batches came after the stop, in their order"


def check_ddp(device: torch.device) -> str:
    """Train with DistributedDataParallel."""
    model = _model(device)
    return _compare_training(model, _with_ddp(model), _data_parallel())


def check_fsdp(device: torch.device) -> str:
    """Train with parameters sharded by FSDP2."""
    model = _model(device)
    for part in (*model.model.layers, model):
        fully_shard(part)
    return _compare_training(model, model, _data_parallel())


def check_sequence_parallel(device: torch.device) -> str:
    """Train with rows that the ranks of a group share."""
    model, layout = _model(device), Layout(rank(), world_size(), sequence=_group_axis())
    return _compare_training(model, _with_ddp(model), layout)


def check_tensor_parallel(device: torch.device) -> str:
    """Train and generate with layers that the ranks of a group share."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    axis = _group_axis()
    layout = Layout(rank(), world_size(), tensor=axis)
    if layout.data_size > 1 and _transformers_version() < (5, 18):
        raise Skip(f"{layout.data_size} groups need Transformers 5.18 or later")
    shards = DistributedConfig(tp_size=axis.size, fsdp_size=layout.data_size)
    with tempfile.TemporaryDirectory() as folder:
        whole = _model(device)  # `save_pretrained` would write on rank 0 only
        whole.config.to_json_file(f"{folder}/config.json")
        save_file(whole.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            distributed_config=shards,
            dtype=torch.float32,
            attn_implementation="nopad",
            trust_remote_code=False,
        )
    completions = ""
    if layout.data_size == 1:  # otherwise the weights are sharded by FSDP as well
        completions = f"; {_compare_completions(model.eval(), device)}"
    return _compare_training(model.train(), model, layout) + completions


def check_generation(device: torch.device) -> str:
    """Compare completions that the ranks generate together with those of each rank alone."""
    return _compare_completions(_model(device).eval(), device)


def _compare_completions(model: Any, device: torch.device) -> str:
    """Compare what all ranks together generate with what each generates alone."""
    prompts = [[1 + i, 2 + i, 3 + i][: 1 + i % 3] for i in range(2 * world_size() + 1)]
    params = [
        SamplingParams(temperature=float(i % 2), max_tokens=8, seed=i) for i in range(len(prompts))
    ]
    shared = DataParallelEngine(Engine(model)).generate(prompts, params)
    alone = Engine(_model(device).eval()).generate(prompts, params)
    wrong = sum(a.token_ids != b.token_ids for a, b in zip(shared, alone, strict=True))
    everyone = gather_objects((wrong, [completion.token_ids for completion in shared]))
    most = max(wrong for wrong, _ in everyone)
    _require(not most, f"{most} of {len(prompts)} completions differ from those of one rank")
    _require(everyone.count(everyone[0]) == len(everyone), "ranks have different completions")
    return f"{len(prompts)} completions agree, greedy and sampled"


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "ranks": check_ranks,
    "packs": check_packs,
    "resume": check_resume,
    "DDP": check_ddp,
    "FSDP2": check_fsdp,
    "SP": check_sequence_parallel,
    "TP": check_tensor_parallel,
    "generation": check_generation,
}


def _dataset(rank: int | None = None, world: int | None = None) -> PackedDataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, BUDGET, 4 * STEPS * world_size())
    documents = [rng.integers(1, VOCAB_SIZE, length) for length in lengths]
    return PackedDataset(documents, budget=BUDGET, rank=rank, world_size=world)


def _loader(layout: Layout, **options: Any) -> PackedLoader:
    return PackedLoader(_dataset(), layout=layout, **options)


def _data_parallel() -> Layout:
    return Layout(rank(), world_size())


def _group_axis() -> Axis:
    """Return the largest groups of ranks that can share the heads of the model."""
    size = math.gcd(world_size(), NUM_HEADS)
    if size == 1:
        raise Skip(f"{world_size()} ranks do not form equal groups of 2, 4 or 8")
    return Axis(1, size)


def _transformers_version() -> tuple[int, ...]:
    """Return the major and minor version."""
    from transformers import __version__

    return tuple(int(part) for part in __version__.split(".")[:2])


def _digest(batch: dict) -> str:
    return hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()


def _model(device: torch.device) -> Any:
    """Build the same tiny model on every rank, and leave the random state as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=NUM_HEADS, max_position_embeddings=BUDGET,
    )  # fmt: skip
    config._attn_implementation = "nopad"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    return model.to(device)


def _with_ddp(model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)


def _compare_training(model: Any, trained: nn.Module, layout: Layout) -> str:
    """Train in a layout, and compare losses and gradients with those of one rank alone.

    trained: the model, or its wrapper.
    """
    attach_loss(model, sequence_group=join_sequence_group(layout))
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for batch in islice(_loader(layout), STEPS):
        optimizer.zero_grad()
        loss = trained(**_to_device(batch, device)).loss
        loss.backward()
        losses.append(sum(gather_objects(loss.item())) / world_size())
        gradients.append([_whole(p.grad).clone() for p in model.parameters()])
        optimizer.step()
    alone = _train_alone(device, layout.data_size)
    loss_errors, gradient_errors = [], []
    for loss, own, (gold_loss, gold) in zip(losses, gradients, alone, strict=True):
        loss_errors.append(abs(loss - gold_loss) / gold_loss)
        gradient_errors += [
            float((a - b).norm() / b.norm()) for a, b in zip(own, gold, strict=True)
        ]
    loss_error, gradient_error = np.max(loss_errors), np.max(gradient_errors)  # NaN if one is
    count, size = layout.data_size, layout.replica_size
    groups = f"{count} group{'s' * (count > 1)} of {size} ranks: " if size > 1 else ""
    note = (
        f"{groups}losses within {loss_error:.0e}, gradients within {gradient_error:.0e} of one "
        "rank's"
    )
    _require(bool(loss_error <= TOLERANCE and gradient_error <= TOLERANCE), note)
    return note


def _train_alone(
    device: torch.device, packs_per_step: int
) -> Iterator[tuple[float, list[torch.Tensor]]]:
    """Yield loss and gradients of each step, computed by this rank from the packs of all."""
    model, packs = _model(device), iter(_dataset(0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step = list(islice(packs, packs_per_step))
        count = sum(pack.num_label_tokens for pack in step)
        loss = sum(_token_losses(model, pack, device) for pack in step) / count
        loss.backward()
        yield loss.item(), [p.grad for p in model.parameters()]
        optimizer.step()


def _token_losses(model: Any, pack: Pack, device: torch.device) -> Any:
    """Return the sum of the losses of a pack's tokens."""
    batch = _to_device(PackedCollator()(pack), device)
    labels = batch.pop("labels")
    logits = model(**batch).logits[0, :-1].float()
    return nn.functional.cross_entropy(
        logits, labels[0, 1:], reduction="sum", ignore_index=IGNORE_INDEX
    )


def _to_device(batch: dict, device: torch.device) -> dict:
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
