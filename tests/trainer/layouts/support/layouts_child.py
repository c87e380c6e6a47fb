"""One rank of the same run in several layouts; prints what it saw as one line of JSON.

    layouts_child.py FOLDER CASE...

Every case trains `STEPS` steps of `GLOBAL_BATCH` packs in fp64, whatever the ranks are for. The run
of one rank leaves its gradients in the folder; the others tell how far theirs are from them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tiny_run
import torch
import torch.distributed as dist
from nopad.inference import DataParallelEngine, Engine, SamplingParams
from nopad.runtime import destroy_group, find_layout, gather_objects, join_sequence_group
from nopad.trainer.data import PackedLoader
from nopad.trainer.data.data_state import load_data_state, save_data_state
from nopad.trainer.fsdp_unshard import unsharded
from nopad.trainer.loss import attach_loss
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, GLOBAL_BATCH, SAVED_AT = 5, 4, 2
DTYPE = {"fp64": torch.float64, "fp32": torch.float32}
RESUMED = "resumed "


class Run:
    """The training of one case: its model, its loader, and what it has seen."""

    def __init__(self, case: str, folder: Path):
        self.folder, (kind, *options) = folder, case.split(",")
        self.dtype = DTYPE[options[0] if options else "fp64"]
        self.experts = "experts" in options
        self.resumes, kind = kind.startswith(RESUMED), kind.removeprefix(RESUMED)
        self.kind, size = kind.rstrip("0123456789"), int(kind[len(kind.rstrip("0123456789")) :])
        self.model = self._model(folder)
        sequence = size if self.kind == "sp" else 1
        self.layout = find_layout(self.model, sequence_parallel=sequence)
        attach_loss(self.model, sequence_group=join_sequence_group(self.layout))
        self.trained = self._wrap()
        self.accumulation = GLOBAL_BATCH // self.layout.data_size
        self.loader = PackedLoader(
            tiny_run.dataset(80), accumulation_steps=self.accumulation, layout=self.layout
        )
        self.seen: dict[str, list] = {"packs": [], "losses": [], "aux_losses": []}
        self.gradients: list[dict[str, torch.Tensor]] = []

    def _model(self, folder: Path) -> Any:
        if self.kind != "tp":
            model = (tiny_run.mixture("eager") if self.experts else tiny_run.model()).to(self.dtype)
            if self.resumes:
                model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            return model
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            folder / "model", tp_plan="auto", dtype=self.dtype, attn_implementation="nopad"
        )

    def _wrap(self) -> Any:
        if self.kind == "fsdp":
            for part in (*self.model.model.layers, self.model):
                fully_shard(part)
        if self.kind in ("fsdp", "tp", "one"):
            return self.model
        return DistributedDataParallel(self.model)

    def train(self, steps: int) -> Run:
        if self.resumes:
            load_data_state(self.loader, self.folder)
        batches = iter(self.loader)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            losses = [self._micro_step(next(batches)) for _ in range(self.accumulation)]
            packs = [info.index for info, _ in self.loader.issued]
            self.loader.issued.clear()
            self._note(packs, *map(sum, zip(*losses, strict=True)))
            optimizer.step()
        return self

    def _micro_step(self, batch: dict) -> tuple[float, float]:
        out = self.trained(**batch)
        (out.loss / self.accumulation).backward()
        aux_loss = out.aux_loss.item() if self.experts else 0.0
        return out.loss.item() / self.accumulation, aux_loss / self.accumulation

    def _note(self, packs: list[int], loss: float, aux_loss: float) -> None:
        """Remember the packs of a step, over all replicas, its losses and its gradient."""
        gathered = gather_objects((self.layout.data_rank, packs, loss, aux_loss))
        by_replica = {replica: own for replica, own, *_ in gathered}
        assert all(by_replica[replica] == own for replica, own, *_ in gathered)
        self.seen["packs"].append(sorted(i for own in by_replica.values() for i in own))
        self.seen["losses"].append(sum(loss for *_, loss, _ in gathered) / len(gathered))
        self.seen["aux_losses"].append(sum(aux for *_, aux in gathered) / len(gathered))
        named = self.model.named_parameters()
        self.gradients.append({name: whole(p.grad).clone() for name, p in named})

    @property
    def gold_file(self) -> Path:
        return self.folder / ("gradients_of_experts.pt" if self.experts else "gradients.pt")

    def distance(self) -> float:
        """The largest difference of a parameter's gradient in any step, relative to its norm."""
        gold = torch.load(self.gold_file, weights_only=True)
        gold = gold[-len(self.gradients) :]
        return max(
            float((ours[name] - wanted[name]).norm() / wanted[name].norm())
            for ours, wanted in zip(self.gradients, gold, strict=True)
            for name in wanted
        )

    def completions(self) -> dict[str, list]:
        """What the model answers after the training."""
        prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12], [13]]
        greedy = SamplingParams(temperature=0, max_tokens=6)
        sampled = SamplingParams(temperature=1.0, max_tokens=6, seed=7)
        with unsharded(self.model):
            engine = DataParallelEngine(Engine(self.model))
            found = {
                name: [c.token_ids for c in engine.generate(prompts, params)]
                for name, params in (("greedy", greedy), ("sampled", sampled))
            }
            scores = engine.score(prompts, [[1, 2]] * len(prompts))
        return {**found, "scores": [round(score.logprob, 6) for score in scores]}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_and_die(run: Run) -> None:
    """Save after some steps, train one more, and be killed in the middle of the next."""
    run.train(SAVED_AT)
    save_data_state(run.loader, run.folder)
    if dist.get_rank() == 0:
        torch.save(run.model.state_dict(), run.folder / "model.pt")
    dist.barrier()
    run.train(1)
    os.kill(os.getpid(), signal.SIGKILL)


def tell(case: str, folder: Path) -> dict:
    run = Run(case.removesuffix(",killed"), folder)
    if case.endswith(",killed"):
        save_and_die(run)
    run.train(STEPS - SAVED_AT if run.resumes else STEPS)
    if run.kind == "one" and not run.resumes:
        torch.save(run.gradients, run.gold_file)
    completions = {} if run.experts else run.completions()
    return {**run.seen, "distance": run.distance(), "completions": completions}


def main(folder: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    print(json.dumps({case: tell(case, Path(folder)) for case in cases}))
    destroy_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
