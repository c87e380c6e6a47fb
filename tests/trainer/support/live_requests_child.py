"""One rank of a training beside a live endpoint: DDP, FSDP2, and FSDP2 that does not fit."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import tiny_run
import torch
import torch.distributed as dist
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine
from nopad.inference.endpoint import serve
from nopad.trainer import fsdp_unshard
from nopad.trainer.evaluation.live_requests import answer_requests
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def ask(url: str) -> list[int | None]:
    """Send requests until the server is gone; return the steps of the answers."""
    steps = []
    with httpx.Client(headers={"Authorization": "Bearer t"}, timeout=60) as http:
        while True:
            body = {"prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True}
            try:
                answer = http.post(f"{url}/completions", json=body)
            except httpx.TransportError:
                return steps
            if answer.status_code != 200:
                return steps
            steps.append(answer.json()["training_step"])


def train(layout: str, served: bool) -> tuple[list[float], list[int | None], float]:
    """Return the final weights, the steps of the answers, and seconds per step without requests."""
    model = tiny_run.model()
    wrapped = model
    if layout == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    server, idle = None, 0.0
    pool = ThreadPoolExecutor(1)
    if served:
        tokenizer = FakeTokenizer(eos_token_id=0)
        server = serve(Engine(model, tokenizer), port=0, token="t", when="step", max_share=1.0)
        start = time.perf_counter()
        for _ in range(20):
            answer_requests(server, 0, wrapped)
        idle = (time.perf_counter() - start) / 20
        client = pool.submit(ask, server.url) if dist.get_rank() == 0 else None
    for step in range(1, STEPS + 1):
        ids = torch.randint(1, tiny_run.VOCABULARY, (1, 8))
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if server is not None:
            while client is not None and server._queue.num_waiting == 0:
                time.sleep(0.001)
            answer_requests(server, step, wrapped, last=step == STEPS)
    steps = []
    if server is not None:
        server.close()
        steps = client.result() if client is not None else []
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(p.double().sum()) for p in whole], steps, idle


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {}
    for layout in ("ddp", "fsdp", "fsdp that does not fit"):
        if layout.endswith("fit"):
            fsdp_unshard._fits = lambda model: False
        without, *_ = train(layout, served=False)
        weights, steps, idle = train(layout, served=True)
        seen[layout] = {"same": weights == without, "steps": steps, "idle": idle}
    print(json.dumps(seen))
    dist.destroy_process_group()
