"""Chat messages to a sample: the tokenizer's template, and loss on the assistant's turns only.

A template with generation markers says itself which tokens the assistant wrote. Most have none;
then the spans are derived by rendering prefixes, and verified against the whole text:

    render(messages[:i], prompt=True)   <user> hi <assistant>
    render(messages[:i + 1])            <user> hi <assistant> hello <end>
    the whole                           <user> hi <assistant> hello <end> <user> ...
                                                             ^^^^^^^^^^^ counts

A token that holds something of an answer counts, whatever else it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..sample import IGNORE_INDEX, Sample


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping], first: int = 0, tools: Any = None
) -> Sample:
    """Render and tokenize a conversation; only assistant turns from message `first` on count.

    tools: what the template shows of functions that may be called.
    """
    _check(tokenizer, messages)
    if first == 0 and re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        ids, counts = _marked(tokenizer, messages, tools)
    else:
        ids, counts = _derived(tokenizer, messages, first, tools)
    if not counts.any():
        raise ValueError("no token of the assistant would count: the conversation trains nothing")
    return Sample(ids, np.where(counts, ids, IGNORE_INDEX))


def assistant_spans(render: Any, messages: Sequence[Mapping], first: int, ends: Sequence[str]):
    """Give the (start, end) characters of each assistant turn in the whole rendered text.

    >>> def render(messages, prompt=False):
    ...     text = "".join(f"<{m['role']}>{m['content']}<end>" for m in messages)
    ...     return text + "<assistant>" * prompt
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    >>> assistant_spans(render, chat, 0, ["<end>"]), render(chat)[24:32]
    ([(24, 32)], 'yes<end>')
    """
    whole, spans = render(messages), []
    for turn, message in enumerate(messages):
        if turn < first or message["role"] != "assistant":
            continue
        before = render(messages[:turn], prompt=True) if turn else _opening(render, messages)
        through = render(messages[: turn + 1])
        if not whole.startswith(before):
            raise ValueError(
                f"the chat template renders what stands before message {turn} differently once "
                "more follows, so its place is not known: use a template with generation markers"
            )
        if whole.startswith(through) and through.startswith(before):
            end = _trimmed(through, len(before), ends)
        else:
            end = _found(whole, len(before), message, turn, ends)
        spans.append((len(before), end))
    return spans


def _opening(render: Any, messages: Sequence[Mapping]) -> str:
    """Give what stands before the first message's content: no template renders no messages."""
    return render([{**messages[0], "content": "\0"}, *messages[1:]]).partition("\0")[0]


def _trimmed(text: str, start: int, ends: Sequence[str]) -> int:
    """Leave out the white space that a template puts between a turn's end mark and the next."""
    bare = text.rstrip()
    return len(bare) if len(bare) > start and bare.endswith(tuple(ends)) else len(text)


def _found(whole: str, start: int, message: Mapping, turn: int, ends: Sequence[str]) -> int:
    """Find the turn's end by its content: some templates rewrite turns that are no longer last."""
    content = str(message.get("content") or "").strip()
    at = whole.find(content, start) if content else -1
    if at < 0:
        raise ValueError(
            f"the chat template rewrites message {turn} once more follows, and its content is not "
            "in the whole text: use a template with generation markers"
        )
    end = at + len(content)
    mark = next((mark for mark in ends if whole.startswith(mark, end)), "")
    return end + len(mark)


def _derived(tokenizer: Any, messages: Sequence[Mapping], first: int, tools: Any):
    def render(part: Sequence[Mapping], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            list(part), tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    marks = _marks(tokenizer)
    spans = assistant_spans(render, messages, first, sorted(marks, key=len, reverse=True))
    encoded = tokenizer(
        render(messages), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], np.int64)
    starts, ends_at = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    # Of a mark, which may take in the white space behind it, the beginning is what decides.
    last = np.where(np.isin(ids, list(marks.values())), starts, ends_at - 1)
    counts = np.zeros(len(ids), bool)
    for start, end in spans:
        counts |= (last >= start) & (starts < end) & (ends_at > starts)
    return ids, counts


def _marked(tokenizer: Any, messages: Sequence[Mapping], tools: Any):
    out = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return np.asarray(out["input_ids"], np.int64), np.asarray(out["assistant_masks"], bool)


def _marks(tokenizer: Any) -> dict[str, int]:
    """Give the special and added tokens, by their text."""
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**dict(special), **getattr(tokenizer, "get_added_vocab", dict)()}


def _check(tokenizer: Any, messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of turns, got {type(messages).__name__}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {turn} must be a dict with role and content")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message has the role assistant: nothing would count for the loss")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "messages need a tokenizer with a chat template, this one has none: set its "
            "chat_template, or take the tokenizer of the model's instruct version"
        )
