"""Many clients at once: none is lost, none is answered twice, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import httpx
import psutil
import pytest
from served import TOKEN, client, running, until

VALUES = [
    None, True, False, 0, -1, 1, 3, 10**30, 1e308, -0.5, "", "a", "\ud800", "x" * 2000, [], [[]],
    ["a"], [1], [-1], [2**70], {}, {"a": 1}, [None], [{"role": "user"}], [{"content": []}],
    [{"role": 3, "content": {"a": []}}], {"1": "x"}, {"5": 2.0}, {"type": "text"}, "auto",
]  # fmt: skip
FIELDS = [
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop",
    "stop_token_ids", "seed", "logprobs", "top_logprobs", "echo", "stream", "stream_options",
    "logit_bias", "tools", "tool_choice", "model", "user", "presence_penalty", "min_tokens",
    "repetition_penalty", "response_format", "max_completion_tokens", "ignore_eos", "suffix",
]  # fmt: skip


@pytest.mark.parametrize("cases", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_body_makes_the_server_fail(cases):
    rng = random.Random(cases)
    calls = [random_call(rng) for _ in range(cases)]
    with running() as server, client(server) as http, ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda call: http.post(call[0], content=call[1]), calls)]
        failed = [(c, a.text) for c, a in zip(calls, answers, strict=True) if a.status_code >= 500]
        assert failed == []
        seen = Counter(answer.status_code for answer in answers)
        assert seen[200] > cases / 20 and seen[400] > cases / 20, seen
        assert server._num_open == 0


def random_call(rng: random.Random) -> tuple[str, str]:
    """A path and a body with up to three fields of any value."""
    body = {"max_tokens": 2} | {n: rng.choice(VALUES) for n in rng.sample(FIELDS, rng.randrange(4))}
    if rng.random() < 0.5:
        return "/v1/completions", json.dumps({"prompt": "a"} | body)
    messages = [{"role": "user", "content": "a"}]
    return "/v1/chat/completions", json.dumps({"messages": messages} | body)


@pytest.mark.parametrize(
    ("num_clients", "num_requests"), [(20, 8), pytest.param(100, 100, marks=pytest.mark.slow)]
)
def test_many_clients_of_every_kind_lose_no_request(num_clients, num_requests):
    """Some leave, some read slowly, some send too much or a wrong token; all beside a training."""
    with running(when="step", max_share=1.0, max_requests=64) as server:
        seen: Counter[str] = Counter()
        stop = False

        def train() -> None:
            step = 0
            while not stop:
                step += 1
                if server.is_due():
                    server.run_requests(step)

        thread = Thread(target=train)
        thread.start()
        try:
            asyncio.run(run_clients(server, 2, 5, Counter()))  # everything is loaded and built
            gc.collect()
            before = psutil.Process().memory_info().rss
            asyncio.run(run_clients(server, num_clients, num_requests, seen))
            until(lambda: server._num_open == 0 and server._queue.num_running == 0)
            gc.collect()
            growth = psutil.Process().memory_info().rss - before
        finally:
            stop = True
            thread.join()
        assert not thread.is_alive() and sum(seen.values()) == num_clients * num_requests
        allowed = {"200", "left", "401", "413", "429", "503"}
        assert {*seen} <= allowed, seen
        assert seen["200"] > seen.total() / 3 and seen["left"] and seen["401"] and seen["413"]
        assert growth < 64 << 20, growth


async def run_clients(server, num_clients: int, num_requests: int, seen: Counter[str]) -> None:
    limits = httpx.Limits(max_connections=num_clients)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    settings = {"base_url": server.url, "headers": headers, "timeout": 120, "limits": limits}
    async with httpx.AsyncClient(**settings) as http:
        await asyncio.gather(*(ask(http, k, num_requests, seen) for k in range(num_clients)))


async def ask(http: httpx.AsyncClient, number: int, count: int, seen: Counter[str]) -> None:
    rng = random.Random(number)
    for _ in range(count):
        seen[await one_request(http, rng)] += 1


async def one_request(http: httpx.AsyncClient, rng: random.Random) -> str:
    length = rng.randrange(1, 12)
    body = {"prompt": [rng.randrange(40, 90)] * 3, "max_tokens": length, "ignore_eos": True}
    kind = rng.choices(["plain", "stream", "leave", "token", "large"], [60, 20, 10, 5, 5])[0]
    if kind == "leave":
        call = http.post("/completions", json=body | {"max_tokens": 200})
        try:
            await asyncio.wait_for(call, rng.random() / 50)
        except TimeoutError:
            return "left"
        return "200"
    if kind == "stream":
        return await read_slowly(http, body, length)
    wrong = {"Authorization": "Bearer wrong"} if kind == "token" else None
    content = json.dumps(body if kind != "large" else {"prompt": "a" * (1 << 20)})
    answer = await http.post("/completions", content=content, headers=wrong)
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == length
    return str(answer.status_code)


async def read_slowly(http: httpx.AsyncClient, body: dict, length: int) -> str:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/completions", json=body) as answer:
        lines = []
        async for line in answer.aiter_lines():
            lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            await asyncio.sleep(0.001)
    if answer.status_code == 200:
        assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["usage"]["completion_tokens"] == length
    return str(answer.status_code)
