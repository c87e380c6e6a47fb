"""The server: OpenAI's API over an engine, its limits, clients that go away, shutdown (D5)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import nopad
import openai
import pytest
from nopad.inference import Engine, SamplingParams
from nopad.inference.endpoint import serve
from served import GREEDY, TOKEN, client, complete, running, until

CHAT = [{"role": "user", "content": "Tom saw a cat"}]


@pytest.fixture(scope="module")
def server():
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def sdk(server):
    return openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0)


def alone(server, prompt, **params):
    return server._engine.generate([prompt], SamplingParams(**{**GREEDY, **params}))[0]


def test_answers_are_those_of_the_engine(server):
    answer = complete(server, ["Lily saw", [40, 41, 42]], logprobs=1).json()
    for choice, prompt in zip(answer["choices"], ["Lily saw", [40, 41, 42]], strict=True):
        want = alone(server, prompt, logprobs=1)
        assert choice["text"] == want.text and choice["finish_reason"] == want.finish_reason
        got = choice["logprobs"]["token_logprobs"]
        assert got == pytest.approx([entry.logprob for entry in want.logprobs], abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 16 and answer["training_step"] is None


def test_the_openai_package_gets_completions_chats_and_streams(server, sdk):
    model, sampled = server.model_name, {"temperature": 1.0, "seed": 5, "max_tokens": 8, "n": 2}
    assert [each.id for each in sdk.models.list()] == [model]
    whole = sdk.chat.completions.create(model=model, messages=CHAT, logprobs=True, **sampled)
    parts = ["", ""]
    reasons, entries = {}, [[], []]
    for chunk in sdk.chat.completions.create(
        model=model, messages=CHAT, stream=True, logprobs=True, **sampled
    ):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert parts == [choice.message.content for choice in whole.choices] and parts[0] != parts[1]
    assert reasons == {k: choice.finish_reason for k, choice in enumerate(whole.choices)}
    for got, choice in zip(entries, whole.choices, strict=True):
        assert [e.token for e in got] == [e.token for e in choice.logprobs.content]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_an_answer(server):
    body = json.dumps({"prompt": "Lily saw", **GREEDY})
    command = ["curl", "-s", f"{server.url}/completions", "-H", f"Authorization: Bearer {TOKEN}"]
    done = subprocess.run([*command, "-d", body], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == alone(server, "Lily saw").text


def test_stop_seed_and_usage_reach_a_stream(server, sdk):
    text = alone(server, "Lily saw", max_tokens=12).text
    stop = text[3:5]
    chunks = sdk.completions.create(
        model=server.model_name, prompt="Lily saw", stop=[stop], stream=True, temperature=0,
        max_tokens=12, stream_options={"include_usage": True},
    )  # fmt: skip
    seen = [*chunks]
    assert "".join(c.choices[0].text for c in seen if c.choices) == text[: text.index(stop)]
    assert seen[-2].choices[0].finish_reason == "stop" and seen[-1].usage.prompt_tokens == 2


def test_echo_returns_the_log_probabilities_of_the_prompt(server):
    choice = complete(server, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    entries = choice["logprobs"]
    want = alone(server, "Lily saw", prompt_logprobs=1, max_tokens=1)
    assert choice["text"] == "Lily saw" + want.text and entries["token_logprobs"][0] is None
    assert entries["token_logprobs"][1] == pytest.approx(want.prompt_logprobs[1].logprob, abs=1e-4)
    top = max(want.prompt_logprobs[1].top_logprobs.values())
    assert max(entries["top_logprobs"][1].values()) == pytest.approx(top, abs=1e-4)


def test_tokens_of_equal_text_keep_separate_log_probabilities(server):
    """A client that compares the best token with its own must not take one for the other."""
    from nopad.inference import TokenLogprob
    from nopad.inference.endpoint.openai_api import Answer, parse_call

    call = parse_call("completion", {"prompt": "a"}, "m")
    answer = Answer(call, "id", 0, "m", lambda ids, skip_special_tokens: "the")
    assert answer.top_logprobs(TokenLogprob(5, -2.0, {9: -0.5})) == {
        "the": -2.0,
        "token_id:9": -0.5,
    }
    assert answer._logprobs([TokenLogprob(5, -math.inf)])["token_logprobs"] == [-9999.0]


def test_tools_reach_the_chat_template(server):
    tokenizer = server._tokenizer.tokenizer
    template, before = tokenizer.chat_template, alone(server, CHAT).prompt_token_ids
    tool = {"type": "function", "function": {"name": "look"}}
    with client(server) as http:
        tokenizer.chat_template = "{{ tools[0].function.name if tools else '' }}" + template
        try:
            body = {"messages": CHAT, "tools": [tool], **GREEDY}
            with_tools = http.post("/v1/chat/completions", json=body).json()["usage"]
            body["tool_choice"] = "none"
            without = http.post("/v1/chat/completions", json=body).json()["usage"]
        finally:
            tokenizer.chat_template = template
    assert without["prompt_tokens"] == len(before) < with_tools["prompt_tokens"]


def test_tools_that_the_chat_template_does_not_use_are_refused(server):
    tool = {"type": "function", "function": {"name": "look"}}
    with client(server) as http:
        response = http.post("/v1/chat/completions", json={"messages": CHAT, "tools": [tool]})
    assert response.status_code == 400
    assert "chat template does not use `tools`: omit them" in response.json()["error"]["message"]


def test_every_route_needs_the_token(server):
    paths = [route.path for route in server._routes.routes]
    assert len(paths) == 5
    wrong = [{"Authorization": sent} for sent in ("", "Bearer s3cre", TOKEN)]
    with client(server) as http:
        for path in [*paths, "/nowhere"]:
            for headers in wrong:
                for method in ("GET", "POST", "OPTIONS"):
                    answer = http.request(method, path, headers=headers)
                    assert answer.status_code == 401, (path, headers, method)
                    assert "access-control-allow-origin" not in answer.headers
        assert httpx.get(f"{server.url}/models").status_code == 401
        assert http.get("/health").json() == {"status": "ok", "training_step": None}
        assert http.get("/nowhere").status_code == 404
        assert http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "object"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": "a", "best_off": 2}, 400, "'best_off' is not supported"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of=2"),
        ({"prompt": "a", "model": "gpt"}, 404, "'gpt' does not exist"),
        ({"prompt": "a", "n": 17}, 400, "at most 16"),
        ({"prompt": "a", "n": True}, 400, "n has a wrong type"),
        ({"prompt": "a", "logprobs": 21}, 400, "at most 20"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "stop": ["x"] * 17}, 400, "at most 16"),
        ({"prompt": "a", "stop": [3]}, 400, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "token ids"),
        ({"prompt": "a", "max_tokens": 256}, 400, "maximum length of 256"),
        ({"prompt": [5, 10**9]}, 400, "vocabulary"),
        ({"prompt": ["a"] * 65}, 400, "at most 64"),
        ({"prompt": "\ud800"}, 400, "surrogate"),
        ({"prompt": "a", "stream": True, "echo": True}, 400, "streamed"),
        (b" " * (1 << 20) + b"{}", 413, "bytes"),
    ],
)
def test_wrong_bodies_are_refused_with_a_reason(server, body, status, says):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with client(server) as http:
        answer = http.post("/v1/completions", content=content)
    assert answer.status_code == status and says in answer.json()["error"]["message"]
    assert len(answer.content) <= 4096


def test_bodies_and_headers_are_limited_whatever_the_client_declares(server):
    with client(server) as http:
        chunks = (b" " * 65536 for _ in range(20))
        assert http.post("/v1/completions", content=chunks).status_code == 413
        many = {f"x-{k}": "a" for k in range(80)}
        assert http.get("/health", headers=many).status_code == 431
        assert http.get("/health", headers={"x": "a" * 20_000}).status_code in (400, 431)
        unknown = {"prompt": "a", "k" * 500_000: 1}
        assert len(http.post("/v1/completions", json=unknown).content) <= 4096


def test_a_client_that_sends_its_body_late_gets_the_answer_to_its_headers(server):
    for path, token, status in (("completions", "wrong", 401), ("nowhere", TOKEN, 404)):
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        with socket.create_connection((server.host, server.port)) as late:
            late.sendall(f"{head}Content-Length: 4\r\n\r\n".encode())
            time.sleep(0.1)
            late.sendall(b"{}  ")
            time.sleep(0.1)
            assert late.recv(100).startswith(f"HTTP/1.1 {status}".encode())


def test_a_full_queue_answers_429(server):
    with running(max_requests=2, when="step") as paused, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(complete, paused) for _ in range(2)]
        until(lambda: paused._queue.num_waiting == 2)
        refused = complete(paused)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        paused.run_requests(7)
        assert [each.result().json()["training_step"] for each in waiting] == [7, 7]
        assert [each.result().headers["X-Training-Step"] for each in waiting] == ["7", "7"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_request(server, stream):
    long = {"prompt": "Lily saw", "max_tokens": 250, "ignore_eos": True, "stream": stream, "n": 8}
    aborted = server._engine.stats.finished.get("abort", 0)

    async def leave() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as http:
            call = asyncio.ensure_future(http.post("/completions", json=long))
            while server._queue.num_running == 0:
                await asyncio.sleep(0.001)
            call.cancel()

    asyncio.run(leave())
    until(lambda: server._queue.num_running == 0 and server._num_open == 0)
    assert server._engine.stats.finished["abort"] == aborted + 8
    assert complete(server).status_code == 200


def test_requests_of_all_connections_share_steps(server):
    steps = server._engine.stats.steps
    with ThreadPoolExecutor(16) as pool:
        body = {"max_tokens": 100, "ignore_eos": True}
        answers = [*pool.map(lambda k: complete(server, [40 + k, 41], **body), range(16))]
    texts = [each.json()["choices"][0]["text"] for each in answers]
    wanted = [alone(server, [40 + k, 41], **body).text for k in (0, 15)]
    assert [texts[0], texts[15]] == wanted
    assert server._engine.stats.steps - steps < 16 * 100 / 2


def test_closing_finishes_every_request():
    with ThreadPoolExecutor(8) as pool:
        with running() as closing:
            body = {"max_tokens": 200, "ignore_eos": True}
            calls = [pool.submit(complete, closing, [40 + k], **body) for k in range(8)]
            until(lambda: closing._queue.num_running == 8)
        answers = [call.result() for call in calls]
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [200] * 8
    with pytest.raises(httpx.ConnectError):
        complete(closing)


def test_a_fault_of_the_engine_is_an_answer_and_the_server_continues(monkeypatch):
    with running() as broken:
        want = complete(broken).json()["choices"]
        runner = broken._engine._executor.runner

        def fail(step):
            raise RuntimeError("seeded")

        monkeypatch.setattr(runner, "launch", fail)
        failed = complete(broken)
        assert failed.status_code == 500 and "RuntimeError" in failed.json()["error"]["message"]
        assert complete(broken).json()["choices"] == want


def test_a_request_returns_what_it_has_at_the_time_limit():
    with running(timeout=0.4) as hurried:
        complete(hurried)  # the first request builds the executor
        answer = complete(hurried, max_tokens=250, n=16, ignore_eos=True, temperature=1).json()
        assert {choice["finish_reason"] for choice in answer["choices"]} <= {"deadline", "length"}
    with running(timeout=0.2, when="step") as paused:
        late = complete(paused)
        assert late.status_code == 503 and "Retry-After" in late.headers
        paused.run_requests(1)
        assert paused._engine.stats.steps == 0, "a request that was refused must not run"


def metrics(server) -> dict[str, float]:
    with client(server) as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = (line for line in answer.text.splitlines() if not line.startswith("# "))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_responses_by_route_and_status():
    with running() as counted, client(counted) as http:
        complete(counted), complete(counted), complete(counted, n="x")
        http.get("/nowhere"), http.get('/"}'), http.get("/health")
        metrics(counted)
        figures = metrics(counted)
    prefix = "nopad_http_responses_total"
    assert {key: value for key, value in figures.items() if key.startswith(prefix)} == {
        f'{prefix}{{route="/v1/completions",status="200"}}': 2,
        f'{prefix}{{route="/v1/completions",status="400"}}': 1,
        f'{prefix}{{route="/health",status="200"}}': 1,
        f'{prefix}{{route="/metrics",status="200"}}': 1,
        f'{prefix}{{route="other",status="404"}}': 2,
    }
    assert figures["nopad_engine_generated_tokens_total"] == 16
    assert figures["nopad_requests_running"] == 0
    assert "nopad_training_step" not in figures, "there is no training"


def test_every_metric_is_explained_in_the_output_and_in_the_documentation():
    page = (Path(nopad.__file__).parent / "docs" / "serve.md").read_text()
    with running(when="step") as beside, client(beside) as http:
        beside.training_step = 3
        http.get("/health")
        lines = http.get("/metrics").text.splitlines()
    kinds = [line.split()[:4] for line in lines if line.startswith("# TYPE ")]
    helped = [line.split()[2] for line in lines if line.startswith("# HELP ")]
    assert [name for _, _, name, _ in kinds] == helped and len(helped) == 9
    assert {line.split("{")[0].split()[0] for line in lines if line[0] != "#"} == {*helped}
    for _, _, name, kind in kinds:
        assert (kind == "counter") == name.endswith("_total") and f"`{name}" in page, name


def test_prompts_and_tokens_are_not_logged(server, caplog):
    with caplog.at_level(logging.DEBUG):
        complete(server, "unheard words")
        complete(server, "unheard words", n="x")
    logged = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert not any("unheard" in r.getMessage() or TOKEN in r.getMessage() for r in logged)


def test_a_server_listens_on_this_machine_and_makes_a_token():
    with running() as made:
        other = serve(made._engine, port=0)
        other.close()
        assert made.host == "127.0.0.1" and len(other.token) >= 32
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{made.port}"):
            serve(made._engine, port=made.port)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"token": ""}, "token"),
        ({"token": "a\nb"}, "without line breaks"),
        ({"when": "now"}, "when='now'"),
        ({"max_share": 0}, "max_share"),
        ({"timeout": 0}, "timeout"),
        ({"port": 65536}, "port is 65536; it must lie in 0..65535"),
        ({"host": ""}, "host is empty, which stands for every address"),
    ],
)
def test_wrong_settings_raise(server, settings, says):
    with pytest.raises(ValueError, match=says):
        serve(server._engine, **{"port": 0, **settings})
    with pytest.raises(ValueError, match="needs a tokenizer"):
        serve(Engine(server._engine._model), port=0)


def test_a_slow_reader_does_not_stop_the_others(server):
    body = json.dumps({"prompt": "Lily saw", "max_tokens": 250, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection((server.host, server.port)) as slow:
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert slow.recv(1)
        assert complete(server).status_code == 200
    until(lambda: server._num_open == 0)
