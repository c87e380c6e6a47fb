"""Chat messages to a sample: the tokenizer's chat template, and loss on assistant turns only.

A template with generation markers marks the assistant's tokens itself. Most have none;
then the spans are derived by rendering prefixes, and verified against the full text:

    render(messages[:i], prompt=True)   <user> hi <assistant>
    render(messages[:i + 1])            <user> hi <assistant> hello <end>
    the full text                       <user> hi <assistant> hello <end> <user> ...
                                                             ^^^^^^^^^^^ labels

A token that contains any part of an answer is a label, even if it contains other text too. A
message with "weight": 0 or "train": false is not a label.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..sample import IGNORE_INDEX, Sample
from ..token_ids import refuse_images

TURN_FLAGS = ("weight", "train", "training", "loss")
"""Keys with which a message of OpenAI, Axolotl or ms-swift is excluded from the loss."""
TURN_DETAILS = frozenset(("train_detail", "training_detail"))
"""Keys that exclude parts of a message, which is not supported."""


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping], first: int = 0, tools: Any = None
) -> Sample:
    """Render and tokenize a conversation; labels are the assistant turns from message `first` on.

    A turn with "weight": 0 or "train": false is not a label.

    tools: the schemas of callable functions, for the template, or their JSON.
    """
    tools = _parse_tools(tools)
    _check_messages(tokenizer, messages)
    is_trained = [_is_trained(turn, message) for turn, message in enumerate(messages)]
    turns = [turn for turn in range(first, len(messages)) if is_trained[turn]]
    if not turns:
        raise ValueError("every assistant turn is excluded from the loss: no labels are left")
    ids, is_label = _labels_of_turns(tokenizer, messages, turns, tools)
    if not is_label.any():
        raise ValueError("the rendered chat has no assistant tokens: no labels are left")
    return Sample(ids, np.where(is_label, ids, IGNORE_INDEX))


def _labels_of_turns(tokenizer: Any, messages: Sequence[Mapping], turns: list[int], tools: Any):
    """Return the ids of the conversation, and which of them belong to these turns."""
    if not re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        return _labels_from_spans(tokenizer, messages, turns, tools)
    ids, is_label = _labels_from_markers(tokenizer, messages, tools)
    if len(turns) == sum(message["role"] == "assistant" for message in messages):
        return ids, is_label
    span_ids, in_turns = _labels_from_spans(tokenizer, messages, turns, tools)
    if not np.array_equal(ids, span_ids):
        raise ValueError(
            "the chat template marks the assistant's tokens but renders other ones as text, so the "
            "turns cannot be located: pass input_ids and labels"
        )
    return ids, is_label & in_turns


def assistant_spans(
    render: Any, messages: Sequence[Mapping], turns: Sequence[int], ends: Sequence[str]
):
    """Return the (start, end) characters of these assistant turns in the full rendered text.

    ends: the end marks of the template, longest first.

    >>> def render(messages, prompt=False):
    ...     text = "".join(f"<{m['role']}>{m['content']}<end>" for m in messages)
    ...     return text + "<assistant>" * prompt
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    >>> assistant_spans(render, chat, [1], ["<end>"]), render(chat)[24:32]
    ([(24, 32)], 'yes<end>')
    """
    text, spans = render(messages), []
    for turn in turns:
        message = messages[turn]
        before = render(messages[:turn], prompt=True) if turn else _opening(render, messages)
        through = render(messages[: turn + 1])
        if not text.startswith(before):
            raise ValueError(
                f"the chat template renders the text before message {turn} differently when "
                "more follow, so its position is unknown: use a template with generation markers"
            )
        if text.startswith(through) and through.startswith(before):
            end = _end_without_space(through, len(before), ends)
        else:
            end = _end_by_content(text, len(before), message, turn, ends)
        spans.append((len(before), end))
    return spans


def _opening(render: Any, messages: Sequence[Mapping]) -> str:
    """Return the text before the first message's content; templates cannot render no messages."""
    return render([{**messages[0], "content": "\0"}, *messages[1:]]).partition("\0")[0]


def _end_without_space(text: str, start: int, ends: Sequence[str]) -> int:
    """Exclude the white space that a template puts between a turn's end mark and the next turn."""
    stripped = text.rstrip()
    ends_marked = len(stripped) > start and stripped.endswith(tuple(ends))
    return len(stripped) if ends_marked else len(text)


def _end_by_content(text: str, start: int, message: Mapping, turn: int, ends: Sequence[str]) -> int:
    """Find a turn's end by its content: some templates rewrite turns that are not the last."""
    content = str(message.get("content") or "").strip()
    begin = text.find(content, start) if content else -1
    if begin < 0:
        raise ValueError(
            f"the chat template rewrites message {turn} when more follow, and its content is not "
            "in the full text: use a template with generation markers"
        )
    end = begin + len(content)
    mark = next((mark for mark in ends if text.startswith(mark, end)), "")
    return end + len(mark)


def _labels_from_spans(tokenizer: Any, messages: Sequence[Mapping], turns: list[int], tools: Any):
    def render(turns: Sequence[Mapping], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            list(turns), tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    special = _special_tokens(tokenizer)
    spans = assistant_spans(render, messages, turns, sorted(special, key=len, reverse=True))
    encoded = tokenizer(
        render(messages), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], np.int64)
    starts, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    # A special token may include the white space after it: its start decides.
    last = np.where(np.isin(ids, list(special.values())), starts, ends - 1)
    is_label = np.zeros(len(ids), bool)
    for start, end in spans:
        is_label |= (last >= start) & (starts < end) & (ends > starts)
    return ids, is_label


def _labels_from_markers(tokenizer: Any, messages: Sequence[Mapping], tools: Any):
    encoded = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    is_label = np.asarray(encoded["assistant_masks"], bool)
    return np.asarray(encoded["input_ids"], np.int64), is_label


def _is_trained(turn: int, message: Mapping) -> bool:
    """Return whether a message says that it counts for the loss, as the assistant's do by default.

    >>> _is_trained(0, {"role": "assistant", "content": "yes", "weight": 0})
    False
    """
    by_default = message["role"] == "assistant"
    for name in TURN_DETAILS & message.keys():
        if message[name] is not None:
            raise ValueError(f"message {turn} has {name}: pass input_ids and labels instead")
    flags = {name: message[name] for name in TURN_FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"message {turn} has {name}={value!r}: pass 0 or 1, true or false")
        if value and not by_default:
            raise ValueError(
                f"message {turn} has {name}={value!r} and the role {message['role']}: only turns "
                "of the assistant are trained; pass input_ids and labels to train others"
            )
    return by_default and all(flags.values())


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special and added tokens, by their text."""
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**dict(special), **getattr(tokenizer, "get_added_vocab", dict)()}


def _check_messages(tokenizer: Any, messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of turns, got {type(messages).__name__}")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {turn} must be a dict with role and content")
        if not hasattr(tokenizer, "images"):  # only that of ImageEncoder has images
            refuse_images(message)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message has the role assistant: there would be no labels")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "messages need a tokenizer with a chat template, this one has none: set its "
            "chat_template, or use the tokenizer of the model's instruct version"
        )


def _parse_tools(tools: Any) -> list | tuple | None:
    """Return a chat's tools; many datasets store them as JSON text, since columns have one type."""
    schemas = tools
    if isinstance(tools, str):
        try:
            schemas = json.loads(tools or "null")
        except json.JSONDecodeError:
            raise ValueError(f"tools must be a list of schemas, got {tools!r:.60}") from None
    if schemas is not None and not isinstance(schemas, list | tuple):
        raise ValueError(f"tools must be a list of schemas, got {type(schemas).__name__}")
    return schemas
