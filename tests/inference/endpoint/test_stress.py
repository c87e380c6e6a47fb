"""Many clients at once: none is lost, none is answered twice, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from served import TOKEN, client, running, train_beside, until
from small_checkpoint import small_tokenizer

LEFT = 0
"""Instead of a status: the client went away."""

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
    with running() as server, client(server, timeout=300) as http, ThreadPoolExecutor(8) as pool:
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
    tokenizer, seen, growth, counts = small_tokenizer(), Counter(), [], {}

    def send(server) -> None:
        asyncio.run(run_clients(server, num_clients, 2, Counter()))  # all is loaded and built
        before, answered = memory(), responses(server)
        asyncio.run(run_clients(server, num_clients, num_requests, seen))
        until(lambda: server._num_open == 0 and server._queue.num_running == 0)
        growth.append(memory() - before)
        counts.update(responses(server) - answered)

    _, state, steps = train_beside(tokenizer, client=send, max_share=0.5, timeout=600)
    _, without, _ = train_beside(tokenizer, steps)
    assert steps > 20 and all(torch.equal(a, b) for a, b in zip(state, without, strict=True))
    sent = Counter(status for _, status in seen.elements())
    print(f"{steps} training steps; sent {dict(sent)}; growth {growth[0] >> 20} MiB")
    assert sent.total() == num_clients * num_requests
    assert {*sent} <= {200, LEFT, 401, 413, 429, 503}
    assert sent[200] > sent.total() / 5 and sent[LEFT] and sent[401] and sent[413]
    assert growth[0] < 32 << 20
    ids = [answer_id for answer_id, status in seen.elements() if status == 200]
    assert len({*ids}) == len(ids), "an answer went to two clients"
    for status in sent.keys() - {LEFT}:  # one who leaves may be answered, or not
        assert 0 <= counts[status] - sent[status] <= sent[LEFT], (status, counts)


def responses(server) -> Counter:
    """By status."""
    counts = Counter()
    for (_, status), count in server._num_responses.items():
        counts[status] += count
    return counts


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def run_clients(server, num_clients: int, num_requests: int, seen: Counter) -> None:
    await asyncio.gather(*(ask(server, k, num_requests, seen) for k in range(num_clients)))


async def ask(server, number: int, count: int, seen: Counter) -> None:
    """A client with a connection of its own.

    A pool that tasks share loses requests by itself: httpcore closes a connection whose keep-alive
    has expired after it has given it to another task.
    """
    rng = random.Random(number)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    settings = {"base_url": server.url, "headers": headers, "timeout": 1200, "verify": False}
    async with httpx.AsyncClient(**settings) as http:
        for _ in range(count):
            seen[await one_request(http, rng)] += 1


async def one_request(http: httpx.AsyncClient, rng: random.Random) -> tuple[str, int]:
    """Send a request; return the answer's id and status. The answer must be that to its prompt."""
    length = rng.randrange(1, 12)
    prompt = "".join(rng.choices("abcdefghij ", k=12))
    body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
    kind = rng.choices(["plain", "stream", "leave", "token", "large"], [60, 20, 10, 5, 5])[0]
    if kind == "leave":
        call = http.post("/completions", json=body | {"max_tokens": 200})
        try:
            return "", (await asyncio.wait_for(call, rng.random() / 50)).status_code
        except TimeoutError:
            return "", LEFT
    if kind == "stream":
        return await read_slowly(http, body, length, rng.random() / 50)
    wrong = {"Authorization": "Bearer wrong"} if kind == "token" else None
    content = json.dumps(body | {"echo": True} if kind != "large" else {"prompt": "a" * (1 << 20)})
    try:
        answer = await http.post("/completions", content=content, headers=wrong)
    except httpx.TransportError as error:
        raise AssertionError(f"a request was lost: {kind}, {error!r}") from error
    if answer.status_code != 200:
        return "", answer.status_code
    done = answer.json()
    assert done["choices"][0]["text"].startswith(prompt), "the answer to another prompt"
    assert done["usage"]["completion_tokens"] == length
    return done["id"], 200


async def read_slowly(
    http: httpx.AsyncClient, body: dict, length: int, seconds: float
) -> tuple[str, int]:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/completions", json=body) as answer:
        lines = []
        async for line in answer.aiter_lines():
            lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            await asyncio.sleep(seconds)
    if answer.status_code != 200:
        return "", answer.status_code
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["usage"]["completion_tokens"] == length
    return last["id"], 200
