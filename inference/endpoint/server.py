"""`serve`: an OpenAI-compatible HTTP server on an engine, alone or beside a running training.

    server = serve(engine, port=8000, token="…")                 # the server's own thread generates
    server = serve(engine, port=8000, when="step")               # the training thread does, after
    trainer.add_callback(ServeCallback(trainer, server))         # optimizer steps

uvicorn and Starlette run in a thread of their own, which never touches the model. Every route needs
the token; bodies, headers, queue, prompts, `n` and time are limited; no route runs code or reads
files. Prompts and answers are not logged.
"""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import PurePath
from threading import Event, Thread
from typing import Any, Literal, TypeVar

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ImportError("starlette and uvicorn are not installed: pip install nopad[serve]") from None

from ...runtime import rank, world_size
from ..engine import Engine
from ..live_model.lockstep import gathers_parameters, lockstep
from ..live_model.replica import replica_ranks
from ..requests.outputs import Completion, StreamEvent
from ..requests.tokenizer_adapter import TokenizerAdapter
from .openai_api import Answer, ApiCall, ApiError, parse_call, parse_json, sampling_params, usage
from .request_queue import RequestQueue, ServedRequest, TimeShare

log = logging.getLogger(__name__)
T = TypeVar("T")

When = Literal["step", "evaluation"]
MAX_BODY_BYTES, MAX_HEADERS, MAX_HEADER_BYTES = 1 << 20, 64, 1 << 14
_CHAT_DEFAULT_TOKENS = 1024
_DRAIN_SECONDS, _MAX_DRAINED_PARTS = 10.0, 256
"""How long, and for how many parts, the rest of a body is read before it is refused."""
_GONE = 499
"""Status for a client that went away, which never sees it; nginx's number."""


def serve(engine: Engine, **settings: Any) -> Server:
    """Start a server on an `engine` and return it; `settings` are the arguments of `Server`."""
    server = Server(engine, **settings)
    server.start()
    return server


class Server:
    """An OpenAI-compatible server on an engine; as a context manager, it closes at the end.

    The server uses the engine's `add_request` and `step`; do not call them yourself meanwhile.
    Beside a training on several ranks, call this on each of them: rank 0 listens and generates.

    Args:
        engine: an engine with a tokenizer.
        host: address to listen on; by default only this machine can connect.
        port: 0 takes a free one, see `Server.port`.
        token: what clients send as `Authorization: Bearer …`; None makes one, see `Server.token`.
        model_name: the model's name in the API; default: that of its checkpoint.
        when: None for a model that is not in training. Beside a training, a front end's
            `ServeCallback` runs the requests after optimizer steps ("step") or when the trainer
            evaluates ("evaluation").
        max_share: largest fraction of the training's time that requests take. Requests start once
            the time they are expected to take is saved up; any excess is charged to later steps.
            1 is no limit.
        max_pause: seconds that requests may stop the training at once, and that are saved up at
            most. A request that is expected to take longer is refused, with status 503.
        max_requests: maximum prompts of all connections; more are refused with status 429.
        timeout: seconds a request may take, with its time in the queue. A request that has not
            started by then is refused with status 503; others return the tokens they have.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        model_name: str | None = None,
        when: When | None = None,
        max_share: float = 0.1,
        max_pause: float = 10.0,
        max_requests: int = 64,
        timeout: float = 60.0,
    ):
        _check(engine, token, when, max_share, max_pause, max_requests, timeout)
        _check_address(host, port)
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.when, self.host = when, host
        self.training_step: int | None = None
        """Optimizer steps of the training so far, kept up to date by the front end's callback."""
        self.model_name = _name_of(engine) if model_name is None else model_name
        self._engine = engine
        self._max_requests, self._timeout = max_requests, timeout
        tokenizer = copy.deepcopy(engine._tokenizer.tokenizer)  # the training's may be in use
        self._tokenizer = TokenizerAdapter(engine._model, tokenizer)
        share = None if when is None else TimeShare(max_share, max_pause)
        self._queue = RequestQueue(engine, share)
        self._num_open = 0
        self._num_responses: dict[tuple[str, int], int] = {}
        """By route and status."""
        self._has_work, self._is_over = Event(), Event()
        self._threads: list[Thread] = []
        self._socket = _listen(host, port) if rank() == 0 else None
        self.port: int = self._socket.getsockname()[1] if self._socket else port
        self._routes = self._build_routes()
        self._uvicorn = uvicorn.Server(self._uvicorn_config())

    @property
    def url(self) -> str:
        """Base address of the API, for `OpenAI(base_url=…)`."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/v1"

    def start(self) -> None:
        """Answer in the background."""
        if self._socket is None:
            return
        targets = [self._run_http] if self.when else [self._run_http, self._run_engine]
        self._threads = [Thread(target=each, daemon=True, name="nopad serve") for each in targets]
        for thread in self._threads:
            thread.start()

    def run(self) -> None:
        """Answer in the foreground, until SIGINT or SIGTERM; finish all requests before."""
        thread = Thread(target=self._run_engine, daemon=True, name="nopad serve")
        thread.start()
        try:
            self._run_http()
        finally:
            thread.join()

    def close(self) -> None:
        """Stop to listen; return when every request is answered.

        Beside a training, requests that still wait are refused with status 503.
        """
        if self.when is not None:
            self._queue.close()
        self._uvicorn.should_exit = True
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- beside a training: called by its thread, on every rank ---

    def is_due(self, last: bool = False) -> bool:
        """Return whether requests wait that may run now; always False on ranks other than 0.

        Args:
            last: the training has ended: ignore `max_share`.
        """
        is_due = self._queue.is_due()  # also starts the clock of the share
        return self._queue.num_waiting > 0 if last else is_due

    def pause(self) -> AbstractContextManager[None]:
        """Charge the time of a block to the share of requests."""
        assert self._queue.time_share is not None
        return self._queue.time_share.pause()

    def run_requests(self, step: int, last: bool = False) -> None:
        """Run the requests that wait, within `pause()`; the model must not change meanwhile.

        Args:
            step: the training step of the weights, which the answers carry.
            last: the training has ended: refuse later requests, and ignore `max_share`.
        """
        model = self._engine._model
        together = world_size() > 1 and gathers_parameters(model.modules())
        with lockstep(model) if together else nullcontext():
            if rank() == 0:
                self._queue.run(step, last)

    # --- threads ---

    def _run_engine(self) -> None:
        """Run requests whenever some wait, until the HTTP thread has ended."""
        while not self._is_over.is_set():
            self._has_work.wait()
            self._has_work.clear()
            self._queue.run()

    def _run_http(self) -> None:
        assert self._socket is not None
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._queue.close()
            self._is_over.set()
            self._has_work.set()
            self._socket.close()

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=60,  # a client that reuses a connection as it closes loses a request
            timeout_graceful_shutdown=int(2 * self._timeout) + 1,
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )

    # --- HTTP ---

    def _build_routes(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        handlers: Any = {ApiError: _on_api_error, HTTPException: _on_http_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request: check token and headers, then route, all within a time limit."""
        self._queue.loop = asyncio.get_running_loop()
        has_started = has_body = False

        async def receive_tracked() -> Any:
            nonlocal has_body
            message = await receive()
            has_body = not message.get("more_body", False)
            return message

        async def send_counted(message: Any) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                # A client that still sends its body would see a reset instead of the answer.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        for _ in range(_MAX_DRAINED_PARTS):
                            if has_body:
                                break
                            await receive_tracked()
                has_started = True
                is_route = any(route.path == scope["path"] for route in self._routes.routes)
                key = scope["path"] if is_route else "other", message["status"]
                self._num_responses[key] = self._num_responses.get(key, 0) + 1
            await send(message)

        try:
            async with asyncio.timeout(2 * self._timeout):
                self._check_headers(scope["headers"])
                await self._routes(scope, receive_tracked, send_counted)
        except (ApiError, TimeoutError) as error:
            if not has_started:
                late = ApiError(408, "the request took too long")
                answer = _error(error if isinstance(error, ApiError) else late)
                await answer(scope, receive_tracked, send_counted)

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            limit = f"{MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in all"
            raise ApiError(431, f"at most {limit} are allowed")
        sent = [value for name, value in headers if name == b"authorization"]
        expected = f"Bearer {self.token}".encode()
        if len(sent) != 1 or not hmac.compare_digest(sent[0], expected):
            raise ApiError(401, "a token is needed: Authorization: Bearer …")

    async def _models(self, _: Request) -> Response:
        model = {"id": self.model_name, "object": "model", "owned_by": "nopad"}
        model |= {"created": 0, "training_step": self.training_step}
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok", "training_step": self.training_step})

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._metrics_text(), media_type="text/plain; version=0.0.4")

    def _metrics_text(self) -> str:
        stats, share, step = self._engine.stats, self._queue.time_share, self.training_step
        responses: dict[str, float] = {
            f'{{route="{route}",status="{status}"}}': count
            for (route, status), count in sorted(self._num_responses.items())
        }
        metrics: list[tuple[str, str, str, dict[str, float]]] = [
            ("requests_waiting", "gauge", "Prompts in the queue.", {"": self._queue.num_waiting}),
            ("requests_running", "gauge", "Prompts that the engine generates for.",
             {"": self._queue.num_running}),
            ("engine_steps_total", "counter", "Forward passes of the engine, not training steps.",
             {"": stats.steps}),
            ("engine_step_seconds_total", "counter", "Seconds spent in the engine's steps.",
             {"": stats.step_seconds}),
            ("engine_computed_tokens_total", "counter",
             "Tokens of prompts and completions that went through the model.",
             {"": stats.num_computed_tokens}),
            ("engine_generated_tokens_total", "counter", "Tokens of completions.",
             {"": stats.new_tokens}),
            ("training_pause_seconds_total", "counter",
             "Seconds for which requests have stopped the training.",
             {} if share is None else {"": share.seconds}),
            ("training_step", "gauge", "Optimizer steps of the training so far.",
             {} if step is None else {"": step}),
            ("http_responses_total", "counter", "HTTP responses by route and status.", responses),
        ]  # fmt: skip
        lines = []
        for name, kind, meaning, values in metrics:
            if values:
                lines += [f"# HELP nopad_{name} {meaning}", f"# TYPE nopad_{name} {kind}"]
                lines += [f"nopad_{name}{labels} {value}" for labels, value in values.items()]
        return "\n".join(lines) + "\n"

    async def _completions(self, http: Request) -> Response:
        return await self._answer("completion", http)

    async def _chat_completions(self, http: Request) -> Response:
        return await self._answer("chat", http)

    async def _answer(self, kind: Literal["completion", "chat"], http: Request) -> Response:
        call = parse_call(kind, parse_json(await _read_body(http)), self.model_name)
        decode = self._tokenizer._require("text").decode
        name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        answer = Answer(call, name, int(time.time()), self.model_name, decode)
        requests = self._requests(call)
        if call.stream:
            return await self._start_stream(call, answer, requests, http)
        async with self._submitted(requests):
            done = await self._unless_gone(http, requests, _completions(requests))
        step = requests[0].step
        return _json(answer.whole(done, step), _step_header(step))

    def _requests(self, call: ApiCall) -> list[ServedRequest]:
        """Tokenize the prompts of a call; ApiError 400 if the model cannot take them."""
        if len(call.prompts) > self._max_requests:
            raise ApiError(400, f"{len(call.prompts)} prompts; at most {self._max_requests}")
        expires = time.monotonic() + self._timeout
        return [self._request(call, prompt, expires) for prompt in call.prompts]

    def _request(self, call: ApiCall, prompt: Any, expires: float) -> ServedRequest:
        try:
            if call.kind == "chat":
                ids = self._apply_template(prompt, call.tools)
            else:
                ids = self._tokenizer.encode(prompt)
        except Exception as error:  # of a template or tokenizer: any type
            raise ApiError(400, f"the prompt cannot be tokenized: {error}") from None
        longest = self._engine._session.settings.max_model_len
        params = dict(call.params)
        if "max_tokens" not in params:
            left = max(1, longest - len(ids))
            params["max_tokens"] = min(left, _CHAT_DEFAULT_TOKENS) if call.kind == "chat" else 16
        if len(ids) + params["max_tokens"] > longest:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and max_tokens is {params['max_tokens']}: "
                f"together they exceed the maximum length of {longest}",
            )
        encoded = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        return ServedRequest(encoded, sampling_params(params), call.stream, expires)

    def _apply_template(self, messages: list[Any], tools: list[Any] | None) -> Any:
        tokenizer = self._tokenizer._require("messages")
        if getattr(tokenizer, "chat_template", "") is None:
            raise ValueError("the tokenizer has no chat template")
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        ids = tokenizer.apply_chat_template(messages, **options)["input_ids"]
        if tools is not None:
            without = ids
            ids = tokenizer.apply_chat_template(messages, tools=tools, **options)["input_ids"]
            if list(ids) == list(without):
                raise ValueError("the model's chat template does not use `tools`: omit them")
        if not len(ids):
            raise ValueError("it is empty")
        return ids

    @asynccontextmanager
    async def _submitted(self, requests: list[ServedRequest]) -> AsyncIterator[None]:
        """Queue requests; at the end, those that are not finished are freed."""
        if self._num_open + len(requests) > self._max_requests:
            raise ApiError(429, f"{self._num_open} requests are open; try again later", 1)
        self._num_open += len(requests)
        try:
            self._queue.put(requests)
            self._has_work.set()
            yield
        finally:
            self._num_open -= len(requests)
            for request in requests:
                request.is_cancelled = True

    async def _unless_gone(
        self, http: Request, requests: list[ServedRequest], work: Awaitable[T]
    ) -> T:
        """Await the engine's work; ApiError if the client goes away or the queue is too slow."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(http))
        try:
            left = requests[0].expires - time.monotonic()
            await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not gone.done() and any(r.is_admitted for r in requests):
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ApiError(_GONE, "the client is gone")
            raise ApiError(503, "the request has waited for too long", self._timeout)
        finally:
            for each in (task, gone):
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each

    async def _start_stream(
        self, call: ApiCall, answer: Answer, requests: list[ServedRequest], http: Request
    ) -> Response:
        """Wait for the first event, which decides on the status, then stream."""
        chunks = self._chunks(call, answer, requests, http)
        first = await anext(chunks)

        async def body() -> AsyncIterator[str]:
            yield first
            async for chunk in chunks:
                yield chunk

        headers = {"Cache-Control": "no-store", **_step_header(requests[0].step)}
        return _Stream(body(), chunks, headers)

    async def _chunks(
        self, call: ApiCall, answer: Answer, requests: list[ServedRequest], http: Request
    ) -> AsyncIterator[str]:
        async with self._submitted(requests):
            n, done = requests[0].params.n, dict[int, Completion]()
            merged = _merge(requests)
            index, event = await self._unless_gone(http, requests, anext(merged))
            step = requests[0].step
            if deltas := answer.first_deltas(n * len(requests)):
                yield _sse(answer.chunk(deltas, step))
            while True:
                if event.text or event.logprobs:
                    choice = answer.delta(index * n + event.sample_index, event)
                    yield _sse(answer.chunk([choice], step))
                if event.completion is not None:
                    done[index] = event.completion
                    samples = enumerate((event.completion, *event.completion.others), index * n)
                    choices = [answer.last_delta(number, each) for number, each in samples]
                    yield _sse(answer.chunk(choices, step))
                if len(done) == len(requests):
                    break
                try:
                    index, event = await anext(merged)
                except ApiError as error:
                    yield _sse(error.body())
                    return
            if call.include_usage:
                yield _sse(answer.chunk([], step, usage=usage([*done.values()])))
            yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream of server-sent events whose requests are freed however it ends."""

    def __init__(self, body: Any, chunks: Any, headers: dict[str, str]):
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            await self._chunks.aclose()


async def _merge(requests: list[ServedRequest]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Yield the events of several requests as they come, with the index of their request."""
    tasks = {asyncio.ensure_future(r.events.get()): k for k, r in enumerate(requests)}
    try:
        while tasks:
            ready, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                index, result = tasks.pop(task), task.result()
                if isinstance(result, ApiError):
                    raise result
                if result.completion is None:
                    tasks[asyncio.ensure_future(requests[index].events.get())] = index
                yield index, result
    finally:
        for task in tasks:
            task.cancel()


async def _completions(requests: list[ServedRequest]) -> list[Completion]:
    """Wait for the requests of a call that is not streamed: each has one event."""
    done = []
    for request in requests:
        result = await request.events.get()
        if isinstance(result, ApiError):
            raise result
        assert result.completion is not None
        done.append(result.completion)
    return done


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read_body(http: Request) -> bytes:
    """Return the body; ApiError 413 if it is too long, whatever its headers say."""
    body, size = [], 0
    try:
        async for part in http.stream():
            size += len(part)
            if size <= MAX_BODY_BYTES:
                body.append(part)
            elif size > 16 * MAX_BODY_BYTES:
                break
    except ClientDisconnect:
        raise ApiError(_GONE, "the client is gone") from None
    if size > MAX_BODY_BYTES:  # read to its end: a client that still sends would miss the answer
        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return b"".join(body)


def _json(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    # ASCII: a text may hold surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(value, allow_nan=False), status, headers, "application/json")


def _sse(value: Any) -> str:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"


def _error(error: ApiError) -> Response:
    return _json(error.body(), error.headers(), error.status)


async def _on_api_error(_: Request, error: ApiError) -> Response:
    return _error(error)


async def _on_http_error(_: Request, error: HTTPException) -> Response:
    return _error(ApiError(error.status_code, error.detail))


def _step_header(step: int | None) -> dict[str, str]:
    return {} if step is None else {"X-Training-Step": str(step)}


def _check_address(host: str, port: int) -> None:
    if not host:
        raise ValueError(
            "host is empty, which stands for every address: pass 127.0.0.1 for this machine alone, "
            "or 0.0.0.0"
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must lie in 0..65535")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _name_of(engine: Engine) -> str:
    path = str(getattr(engine._model.config, "_name_or_path", "") or "model")
    return PurePath(path).name


def _check(
    engine: Any,
    token: Any,
    when: Any,
    max_share: float,
    max_pause: float,
    count: int,
    timeout: float,
) -> None:
    if not isinstance(engine, Engine):
        raise ValueError(f"engine is a {type(engine).__name__}; pass an Engine")
    if not engine._tokenizer.has_tokenizer:
        raise ValueError("a server needs a tokenizer: Engine(model, tokenizer)")
    if len(replica_ranks(engine._model)) > 1:
        raise ValueError("a model with tensor parallelism cannot be served; use data parallelism")
    is_text = isinstance(token, str) and token.isascii() and token.isprintable() and token
    if token is not None and not is_text:
        raise ValueError(
            "token must be ASCII text of at least one character without line breaks, or None to "
            "make one"
        )
    if when not in (None, "step", "evaluation"):
        raise ValueError(f"when={when!r}: pass 'step', 'evaluation' or None")
    if not 0 < max_share <= 1:
        raise ValueError(f"max_share is {max_share!r}; it must lie in (0, 1]")
    for name, value in {"max_pause": max_pause, "max_requests": count, "timeout": timeout}.items():
        if not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be above 0")
