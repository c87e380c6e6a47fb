"""Files of prompts: lines of text, JSON objects one a line, or one JSON list.

    prompts.txt    Once upon a time
    chats.jsonl    {"messages": [{"role": "user", "content": "Lily"}], "max_tokens": 8}
    all.json       ["Once upon a time", {"prompt": [1, 403, 407], "temperature": 0.5}]

Empty lines are passed over. What a JSON object says of sampling holds for its prompt; what else
it holds is left alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

Asked = tuple[Any, dict[str, Any]]
"""A prompt, and the sampling settings it brings along."""


def read_prompts(name: str, objects: bool = False) -> list[Asked]:
    """Read the file of this name, or standard input if it is `-`; objects: its lines are JSON."""
    with _opened(name) as file:
        if name.endswith(".json"):
            return list(_listed(name, file.read()))
        if objects or name.endswith(".jsonl"):
            return list(_lines(name, file))
        return [(line.rstrip("\n"), {}) for line in file if line.strip()]


@contextmanager
def _opened(name: str) -> Iterator[IO[str]]:
    where = "standard input" if name == "-" else name
    try:
        if name != "-":
            with Path(os.path.expanduser(name)).open(encoding="utf-8") as file:
                yield file
            return
        if hasattr(sys.stdin, "reconfigure"):  # whatever the locale says
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # pyright: ignore
        yield sys.stdin
    except FileNotFoundError:
        raise ValueError(f"--file {name}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason}") from None


def _listed(name: str, text: str) -> Iterator[Asked]:
    found = _parsed(name, text)
    if not isinstance(found, list):
        raise ValueError(f"{name} holds no list of prompts; JSON objects one a line go into .jsonl")
    for number, one in enumerate(found, start=1):
        yield _asked(f"{name}, entry {number}", one)


def _lines(name: str, lines: Iterable[str]) -> Iterator[Asked]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _asked(where, _parsed(where, line))


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from None


def _asked(where: str, one: Any) -> Asked:
    """Take one entry apart.

    >>> _asked("here", {"prompt": "Lily", "max_tokens": 8, "answer": "a girl"})
    ('Lily', {'max_tokens': 8})
    """
    from ..inference import SamplingParams

    if isinstance(one, str | list):
        return one, {}
    if not isinstance(one, dict) or not one.keys() & {"prompt", "messages"}:
        raise ValueError(f'{where}: has neither "prompt" nor "messages"')
    prompt = one.get("prompt")
    names = [field.name for field in fields(SamplingParams)]
    knobs: dict[str, Any] = {name: one[name] for name in names if name in one}
    if isinstance(bias := knobs.get("logit_bias"), dict):  # JSON has no other keys than texts
        knobs["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
    try:
        SamplingParams(**{"max_tokens": sys.maxsize, **knobs})  # how many, the options may say
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return (one.get("messages") if prompt is None else prompt), knobs
