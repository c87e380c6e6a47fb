"""A server on a small model, and clients of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import torch
from nopad.inference import Engine
from nopad.inference.endpoint import Server, serve
from nopad.trainer.evaluation.live_requests import answer_requests
from small_checkpoint import random_model, small_tokenizer

TOKEN = "s3cret"
GREEDY = {"temperature": 0, "max_tokens": 8}


@contextmanager
def running(**settings: Any) -> Iterator[Server]:
    """A server on a small random model, at a free port."""
    tokenizer = small_tokenizer()
    engine = Engine(random_model(tokenizer), tokenizer)
    with serve(engine, port=0, token=TOKEN, **settings) as server:
        yield server


def client(server: Server, token: str = TOKEN, **settings: Any) -> httpx.Client:
    base = server.url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=base, headers=headers, **{"timeout": 30, **settings})


def complete(server: Server, prompt: Any = "Lily saw", **body: Any) -> httpx.Response:
    with client(server) as http:
        return http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **body})


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def train_beside(
    tokenizer: Any,
    steps: int | None = None,
    client: Callable[[Server], None] | None = None,
    num_updates: float = float("inf"),
    **settings: Any,
) -> tuple[Any, list[torch.Tensor], int]:
    """Train a small model on random tokens while a client asks; return model, state and steps.

    Without a number of steps, train until the client is done. Later steps than `num_updates` have a
    learning rate of 0, so that all answers from then on are those of the same weights.
    """
    torch.manual_seed(1)
    model = random_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    server, step, failures = None, 0, []
    if client is not None:
        engine = Engine(model, tokenizer)
        server = serve(engine, port=0, token=TOKEN, model_name="model", when="step", **settings)

        def ask() -> None:
            try:
                client(server)
            except BaseException as error:
                failures.append(error)

        thread = Thread(target=ask)
        thread.start()
    while step != steps and (steps is not None or thread.is_alive()):
        optimizer.param_groups[0]["lr"] = 1e-2 if step < num_updates else 0.0
        ids = torch.randint(len(tokenizer), (1, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if server is not None:
            time.sleep(0.03 if step > num_updates and not server.is_due() else 0)
            answer_requests(server, step, model)
    if server is not None:
        server.close()
    if failures:
        raise failures[0]
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return model, [*model.state_dict().values(), *moments, torch.get_rng_state()], step
