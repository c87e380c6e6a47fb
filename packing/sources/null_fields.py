"""Remove the null fields of chats: Arrow gives all messages of a column the same fields."""

from __future__ import annotations

from typing import Any

CHAT_COLUMNS = ("messages", "prompt", "completion", "tools")


def drop_null_fields(row: dict) -> dict:
    """Remove the null fields that Arrow added to the chats of a row.

    A template that asks whether a message has tool calls would see them in every message.

    >>> drop_null_fields({"messages": [{"role": "user", "content": "hi", "tool_calls": None}]})
    {'messages': [{'role': 'user', 'content': 'hi'}]}
    """
    chats = [name for name in CHAT_COLUMNS if isinstance(row.get(name), list)]
    return {**row, **{name: _without_nulls(row[name]) for name in chats}} if chats else row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    # Templates read `content` of a turn with tool calls, where chats may have a genuine null.
    kept = (item for item in value.items() if item[1] is not None or item[0] == "content")
    return {name: _without_nulls(entry) for name, entry in kept}
