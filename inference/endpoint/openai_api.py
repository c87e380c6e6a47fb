"""Translate OpenAI's API: request bodies to prompts and sampling parameters, completions to JSON.

    {"prompt": …, "max_tokens": 8} ─▶ ApiCall(prompts, params) ─▶ … ─▶ {"choices": […], "usage": …}

Fields that are not supported are refused instead of ignored. vLLM's names for sampling parameters
that OpenAI lacks (`top_k`, `min_p`, …) are accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..requests.outputs import Completion, StreamEvent, TokenLogprob
from ..requests.sampling_params import SamplingParams

MAX_N, MAX_LOGPROBS, MAX_STOPS, MAX_BIASES = 16, 20, 16, 1024
_MAX_MESSAGE = 1000
"""Characters of an error message: an answer does not repeat a body of a megabyte."""
_MIN_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON cannot express; as in vLLM."""

# The API has its own fields for log-probabilities.
_SAMPLING = [field.name for field in fields(SamplingParams) if "logprobs" not in field.name]
_COMMON = ("model", "stream", "stream_options", "user", *_SAMPLING)
_FIELDS = {
    "completion": {*_COMMON, "prompt", "echo", "logprobs", "suffix", "best_of"},
    "chat": {
        *_COMMON, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools",
        "tool_choice", "response_format",
    },
}  # fmt: skip
_ONLY = {"suffix": ("",), "best_of": (1,), "response_format": ({"type": "text"},)}
"""Fields with the values that change nothing; others are refused."""


class ApiError(Exception):
    """An answer that is an error, with its HTTP status."""

    def __init__(self, status: int, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        seconds = self.retry_after
        return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        message = str(self)[:_MAX_MESSAGE]
        return {"error": {"message": message, "type": kind, "param": None, "code": self.status}}


@dataclass(frozen=True, slots=True)
class ApiCall:
    """The body of a request, checked."""

    kind: Literal["completion", "chat"]
    prompts: list[Any]
    """Texts, lists of token ids, or the messages of one chat."""
    params: dict[str, Any]
    """Arguments of `SamplingParams`; without `max_tokens`, the API's default applies."""
    stream: bool
    include_usage: bool
    echo: bool
    tools: list[Any] | None


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds; ApiError 400 for anything else."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: each for name, each in value.items() if each is not None}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_call(kind: Literal["completion", "chat"], body: dict[str, Any], model: str) -> ApiCall:
    """Check the fields of a body; ApiError 400, or 404 for another model."""
    unknown = sorted(body.keys() - _FIELDS[kind])
    if unknown:
        raise ApiError(400, f"{unknown[0]!r} is not supported")
    if body.get("model", model) != model:
        raise ApiError(404, f"model {body['model']!r} does not exist; this server has {model!r}")
    for name, values in _ONLY.items():
        if name in body and body[name] not in values:
            raise ApiError(400, f"{name}={body[name]!r} is not supported")
    stream = _flag(body, "stream")
    options = _typed(body, "stream_options", dict, {})
    echo = _flag(body, "echo")
    if stream and echo:
        raise ApiError(400, "echo cannot be streamed: omit one of echo and stream")
    prompts = _messages(body) if kind == "chat" else _prompts(body)
    params = _params(kind, body, echo)
    include_usage = _flag(options, "include_usage")
    return ApiCall(kind, prompts, params, stream, include_usage, echo, _tools(body))


def sampling_params(params: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters; ApiError 400 if they are invalid."""
    try:
        return SamplingParams(**params)
    except (ValueError, TypeError, OverflowError) as error:
        raise ApiError(400, str(error)) from None


def _params(kind: str, body: dict[str, Any], echo: bool) -> dict[str, Any]:
    params = {name: body[name] for name in _SAMPLING if name in body}
    if "max_completion_tokens" in body:
        params["max_tokens"] = body["max_completion_tokens"]
    if kind == "chat":
        count = _typed(body, "top_logprobs", int, 0)
        logprobs = count if _flag(body, "logprobs") else None
        if count and logprobs is None:
            raise ApiError(400, "top_logprobs needs logprobs=true")
    else:
        logprobs = _typed(body, "logprobs", int, None)
    params["logprobs"] = logprobs
    params["prompt_logprobs"] = logprobs if echo else None
    params["logit_bias"] = _logit_bias(body)
    _limit("n", _typed(params, "n", int, 1), MAX_N)
    _limit("logprobs", logprobs or 0, MAX_LOGPROBS)
    stop = _typed(params, "stop", (str, list), [])
    _limit("the number of stop strings", 1 if isinstance(stop, str) else len(stop), MAX_STOPS)
    stop_ids = _typed(params, "stop_token_ids", list, [])
    _limit("the number of stop_token_ids", len(stop_ids), MAX_BIASES)
    sampling_params(params | {"max_tokens": params.get("max_tokens", 2**31)})
    return params


def _limit(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise ApiError(400, f"{name} is {value}; this server allows at most {limit}")


def _typed(body: dict[str, Any], name: str, types: Any, default: Any) -> Any:
    value = body.get(name, default)
    if value is not default and (not isinstance(value, types) or isinstance(value, bool)):
        raise ApiError(400, f"{name} has a wrong type: {type(value).__name__}")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false")
    return value


def _logit_bias(body: dict[str, Any]) -> dict[int, float]:
    bias = _typed(body, "logit_bias", dict, {})
    _limit("the number of logit_bias entries", len(bias), MAX_BIASES)
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(400, "the keys of logit_bias must be token ids") from None


def _prompts(body: dict[str, Any]) -> list[Any]:
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    is_batch = isinstance(prompt, list) and all(isinstance(p, str) or _is_ids(p) for p in prompt)
    if not is_batch or not prompt:
        raise ApiError(400, "prompt must be a text, a list of token ids, or a list of these")
    return prompt


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _messages(body: dict[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of objects with a role")
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ApiError(400, "every message must be an object with a role")
    return [messages]


def _tools(body: dict[str, Any]) -> list[Any] | None:
    tools = _typed(body, "tools", list, None)
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(400, f"tool_choice={choice!r} is not supported; pass 'auto' or 'none'")
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools must be a list of objects")
    return tools if choice == "auto" and tools else None


class Answer:
    """The answer to one call: JSON objects in OpenAI's format."""

    def __init__(
        self, call: ApiCall, answer_id: str, created: int, model: str, decode: Callable[..., str]
    ):
        """decode: the tokenizer's."""
        self._call = call
        self._decode = decode
        self._head = {"id": answer_id, "created": created, "model": model}

    def whole(self, completions: Sequence[Completion], step: int | None) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""
        is_chat = self._call.kind == "chat"
        samples = [each for done in completions for each in (done, *done.others)]
        return {
            **self._head,
            "object": "chat.completion" if is_chat else "text_completion",
            "choices": [self._choice(index, each) for index, each in enumerate(samples)],
            "usage": usage(completions),
            "training_step": step,
        }

    def chunk(self, choices: list[dict[str, Any]], step: int | None, **more: Any) -> dict[str, Any]:
        """Return one object of a stream."""
        kind = "chat.completion.chunk" if self._call.kind == "chat" else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "training_step": step, **more}

    def first_deltas(self, count: int) -> list[dict[str, Any]]:
        """Return the choices of a chat's first chunk, which name the role."""
        if self._call.kind != "chat":
            return []
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(count)]

    def delta(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """Return the new text of one completion."""
        logprobs = None if event.logprobs is None else self._logprobs(event.logprobs)
        if self._call.kind == "chat":
            return self._delta(index, {"content": event.text}, logprobs)
        choice = {"index": index, "text": event.text, "logprobs": logprobs}
        return {**choice, "finish_reason": None}

    def last_delta(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the choice that says why a completion ended."""
        reason = {"finish_reason": completion.finish_reason}
        if self._call.kind == "chat":
            return self._delta(index, {}) | reason
        return {"index": index, "text": "", "logprobs": None} | reason

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text, entries = completion.text or "", completion.logprobs
        if self._call.echo:
            prompt = completion.prompt_token_ids or []
            text = self._decode(prompt, skip_special_tokens=True) + text
            if entries is not None:
                known = completion.prompt_logprobs or []
                pairs = zip(prompt, known, strict=True)
                entries = [entry or TokenLogprob(t, math.nan) for t, entry in pairs] + entries
        logprobs = None if entries is None else self._logprobs(entries)
        choice = {"index": index, "logprobs": logprobs, "finish_reason": completion.finish_reason}
        if self._call.kind == "chat":
            return {**choice, "message": {"role": "assistant", "content": text}}
        return {**choice, "text": text}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._call.kind == "chat":
            return {"content": [self._chat_logprob(entry) for entry in entries]}
        tokens = [self._name(entry.token_id) for entry in entries]
        ends = [0]
        for token in tokens:
            ends.append(ends[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self.top_logprobs(entry) for entry in entries],
            "text_offset": ends[:-1],
        }

    def top_logprobs(self, entry: TokenLogprob) -> dict[str, Any] | None:
        """Return log-probabilities by token, with that of the token itself."""
        if math.isnan(entry.logprob):
            return None
        top = {self._name(entry.token_id): _finite(entry.logprob)}
        for token, logprob in entry.top_logprobs.items():
            if token != entry.token_id:
                name = self._name(token)
                top[f"token_id:{token}" if name in top else name] = _finite(logprob)
        return top

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = entry.top_logprobs.items()
        return self._named(entry.token_id, entry.logprob) | {
            "top_logprobs": [self._named(token, logprob) for token, logprob in top]
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        is_text = not name.startswith("token_id:")
        as_bytes = list(name.encode()) if is_text else None
        return {"token": name, "logprob": _finite(logprob), "bytes": as_bytes}

    def _name(self, token: int) -> str:
        """Return the text of a token; a part of a character has none, so its id is the name."""
        text = self._decode([token], skip_special_tokens=False)
        return f"token_id:{token}" if not text or "\ufffd" in text else text


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Count the tokens of prompts and completions."""
    prompt = sum(len(done.prompt_token_ids or ()) for done in completions)
    new = sum(len(each.token_ids) for done in completions for each in (done, *done.others))
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _finite(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, _MIN_LOGPROB)
