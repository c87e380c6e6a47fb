"""Read prompts from a file: lines of text, JSON objects one per line, or one JSON list.

    prompts.txt    Once upon a time
    chats.jsonl    {"messages": [{"role": "user", "content": "Lily"}], "max_tokens": 8}
    all.json       ["Once upon a time", {"prompt": [1, 403, 407], "temperature": 0.5}]

Empty lines are skipped. Sampling parameters in a JSON object apply to its prompt; its other fields
are ignored; a misspelled parameter name is refused. Suffixes may be in capitals; a byte order mark
is skipped.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

PromptEntry = tuple[Any, dict[str, Any]]
"""A prompt, and its own sampling parameters."""
MIN_SIMILARITY = 0.85
"""Similarity (of difflib) from which a field counts as a misspelled parameter."""


def read_prompts(name: str, is_jsonl: bool = False) -> list[PromptEntry]:
    """Read a file, or standard input if its name is `-`; is_jsonl: its lines are JSON."""
    label, suffix = _label(name), Path(name).suffix.lower()
    with _open(name) as file:
        if is_jsonl or suffix == ".jsonl":
            return list(_parse_lines(label, file))
        if suffix == ".json":
            return list(_parse_list(label, file.read()))
        return [(line.rstrip("\n"), {}) for line in file if line.strip()]


@contextmanager
def _open(name: str) -> Iterator[IO[str]]:
    try:
        if name != "-":
            with Path(os.path.expanduser(name)).open(encoding="utf-8-sig") as file:
                yield file
            return
        if sys.stdin is None:
            raise ValueError("--file -: standard input is closed")
        if hasattr(sys.stdin, "reconfigure"):  # UTF-8 in every locale, and lines as those of a file
            stdin: Any = sys.stdin
            stdin.reconfigure(encoding="utf-8-sig", errors="strict", newline=None)
        yield sys.stdin
    except FileNotFoundError:
        raise ValueError(f"--file {name}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"--file {name} is a folder: pass a file in it") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{_label(name)} is not UTF-8: {error.reason}") from None


def _label(name: str) -> str:
    return "standard input" if name == "-" else name


def _parse_list(name: str, text: str) -> Iterator[PromptEntry]:
    entries = _parse_json(name, text)
    if not isinstance(entries, list):
        raise ValueError(
            f"{name} is not a list of prompts; use .jsonl for one JSON object per line"
        )
    for number, entry in enumerate(entries, start=1):
        yield _parse_entry(f"{name}, entry {number}", entry)


def _parse_lines(name: str, lines: Iterable[str]) -> Iterator[PromptEntry]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            label = f"{name}, line {number}"
            yield _parse_entry(label, _parse_json(label, line))


def _parse_json(label: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{label}: JSON is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise ValueError(f"{label}: a number has too many digits") from None


def _parse_entry(label: str, entry: Any) -> PromptEntry:
    """Split an entry into its prompt and its sampling parameters.

    >>> _parse_entry("a.jsonl, line 1", {"prompt": "Lily", "max_tokens": 8, "answer": "a girl"})
    ('Lily', {'max_tokens': 8})
    """
    from ..inference import SamplingParams

    if isinstance(entry, str | list):
        return _check_prompt(label, entry), {}
    if not isinstance(entry, dict) or not entry.keys() & {"prompt", "messages"}:
        raise ValueError(f'{label}: has neither "prompt" nor "messages"')
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if prompt is not None and messages is not None:
        raise ValueError(f'{label}: has both "prompt" and "messages": remove one')
    if messages is not None and not _is_list_of(dict, messages):
        raise ValueError(f'{label}: "messages" must be a list of objects with "role", "content"')
    names = [field.name for field in fields(SamplingParams)]
    _check_spelling(label, entry, names)
    params: dict[str, Any] = {name: entry[name] for name in names if name in entry}
    if isinstance(bias := params.get("logit_bias"), dict):  # keys are strings in JSON
        params["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
    _check_prompt(label, messages if prompt is None else prompt)
    try:
        # Check now; --max-tokens may raise the default limit that min_tokens is compared with.
        SamplingParams(**{"max_tokens": sys.maxsize, **params})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label}: {error}") from None
    return (messages if prompt is None else prompt), params


def _check_spelling(label: str, entry: dict[str, Any], names: list[str]) -> None:
    """Raise for a field whose name is nearly that of a parameter that the entry does not have.

    >>> _check_spelling("a.jsonl, line 1", {"prompt": "a", "maxTokens": 8}, ["max_tokens"])
    Traceback (most recent call last):
    ValueError: a.jsonl, line 1: unknown field "maxTokens": did you mean "max_tokens"?
    """
    absent = {_letters(name): name for name in names if name not in entry}
    for field in entry.keys() - {"prompt", "messages", *names}:
        near = difflib.get_close_matches(_letters(field), absent, 1, MIN_SIMILARITY)
        if near:
            raise ValueError(f'{label}: unknown field "{field}": did you mean "{absent[near[0]]}"?')


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _check_prompt(label: str, prompt: Any) -> Any:
    """Return a prompt of text, token ids or messages; raise for anything else."""
    if isinstance(prompt, str) or _is_list_of(dict, prompt) or _is_list_of(int, prompt):
        return prompt
    raise ValueError(f"{label}: a prompt is text, a list of token ids or a list of messages")


def _is_list_of(kind: type, value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
