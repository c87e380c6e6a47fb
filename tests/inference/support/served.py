"""A server on a small model, and clients of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from nopad.inference import Engine
from nopad.inference.endpoint import Server, serve
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
