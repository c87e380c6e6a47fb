"""Convert rows of other layouts for the encoder: Alpaca, ShareGPT, or any by a user's function.

alpaca     instruction, input?, output, system?            ─▶ prompt, completion
sharegpt   conversations [{from, value}], system?, tools?  ─▶ messages, tools
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

RowFormat = Literal["alpaca", "sharegpt"] | Callable[[Any], Any]
"""The name of a layout, or a function from a row to one with text, messages or input_ids."""

ALPACA_SYSTEM = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request."
)
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The names of speakers in ShareGPT's rows, and their roles in chat templates."""


def alpaca_row(row: Any) -> dict:
    """Return an Alpaca row as a prompt, in the text of the Alpaca authors, and its completion.

    >>> row = alpaca_row({"instruction": "Add.", "input": "1 2", "output": "3"})
    >>> row["prompt"].splitlines()[2:], row["completion"]
    (['### Instruction:', 'Add.', '', '### Input:', '1 2', '', '### Response:'], '3')
    """
    _require(row, "alpaca", "instruction", "output")
    if row.get("history"):
        raise ValueError("the row has a history of several turns: pass a function as format=")
    context = row.get("input") or ""
    system = row.get("system") or ALPACA_SYSTEM.format(
        ", paired with an input that provides further context" if context else ""
    )
    parts = [system, f"### Instruction:\n{row['instruction']}"]
    parts += [f"### Input:\n{context}"] if context else []
    return {"prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": row["output"]}


def sharegpt_row(row: Any) -> dict:
    """Return a ShareGPT row as messages for the tokenizer's chat template.

    >>> sharegpt_row({"conversations": [{"from": "human", "value": "hi"}]})
    {'messages': [{'role': 'user', 'content': 'hi'}]}
    """
    _require(row, "sharegpt", "conversations")
    messages = [_message(turn) for turn in row["conversations"]]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    tools = row.get("tools")
    return {"messages": messages, **({"tools": tools} if tools else {})}


ROW_FORMATS: dict[str, Callable[[Any], dict]] = {"alpaca": alpaca_row, "sharegpt": sharegpt_row}


def row_format(name: RowFormat) -> Callable[[Any], Any]:
    """Return the function that converts the rows of a format."""
    if callable(name) and not isinstance(name, type):
        return name
    if not isinstance(name, str) or name not in ROW_FORMATS:
        raise ValueError(f"format={name!r}: choose {', '.join(ROW_FORMATS)}, or pass a function")
    return ROW_FORMATS[name]


def suggest_format(row: Mapping) -> str:
    """Advise what to do with a row that has no known columns.

    >>> suggest_format({"conversations": []})
    'pass format="sharegpt"'
    """
    if {"chosen", "rejected"} <= row.keys() or {"chosen_ids", "rejected_ids"} <= row.keys():
        return (
            "it is a preference pair, which PreferenceCollator packs; to train on the chosen "
            "answers alone, convert the rows to prompt and completion"
        )
    names = {"alpaca": {"instruction", "output"}, "sharegpt": {"conversations"}}
    found = next((name for name, columns in names.items() if columns <= row.keys()), None)
    if found is None:
        return "name the text's column with text_column=, or pass a function as format="
    return f'pass format="{found}"'


def format_name(name: RowFormat) -> str:
    """Return the name of a format; for a function, where it is defined."""
    if isinstance(name, str):
        return name
    return f"{getattr(name, '__module__', '')}.{getattr(name, '__qualname__', type(name).__name__)}"


def _message(turn: Any) -> dict:
    if not isinstance(turn, Mapping) or turn.get("from") is None or turn.get("value") is None:
        raise ValueError(f"a turn of conversations needs from and value, got {turn!r:.60}")
    role = SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        raise ValueError(
            f"unknown speaker {turn['from']!r}, known are {', '.join(SHAREGPT_ROLES)}: pass a "
            "function as format="
        )
    counted = {name: turn[name] for name in ("weight", "train") if turn.get(name) is not None}
    return {"role": role, "content": turn["value"], **counted}


def _require(row: Any, name: str, *columns: str) -> None:
    keys = row.keys() if isinstance(row, Mapping) else ()
    if missing := [column for column in columns if column not in keys or row[column] is None]:
        found = f"the keys {sorted(map(str, keys))[:8]}" if keys else f"type {type(row).__name__}"
        raise ValueError(f"a row of {found} is not {name}: it has no {' and '.join(missing)}")
