"""The state of a run: small versioned JSON, the same on every rank.

    {"version": 2, "settings": {...}, "data": "fingerprint", "epochs": 3,
     "packs": null, "over": false,                         whether a pass of so many has ended
     "position": {"epoch", "start", "index", "until"},     packs below `index` were stepped
     "shards": {"0": "...", ...}}                          cursors, where lengths are unknown

It says what makes the sequence of packs and where in it the run stands. A state that was made
with other data or settings is refused, naming what differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

VERSION = 2
"""Grows with the format, and when the same data and settings would give other packs."""
FIELDS = {"version", "settings", "data", "epochs", "position", "packs", "over", "shards", "worker"}
OPTIONAL = {"shards", "worker"}
POSITION = ("epoch", "start", "index", "until")


def check_state(state: Any, settings: dict, data: str) -> None:
    """Refuse a state that does not continue this run, naming the difference."""
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError("this is no state of a PackedDataset: it has no version")
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this nopad reads {VERSION}: "
            "use the nopad that wrote it"
        )
    if set(state) - FIELDS or FIELDS - OPTIONAL - set(state):
        raise ValueError(f"the state has the fields {sorted(state)}, expected {sorted(FIELDS)}")
    _check_settings(state["settings"], settings)
    if state["data"] != data:
        raise ValueError(
            f"the state was made with other data: fingerprint {state['data']}, here {data}"
        )
    _check_position(state["position"])
    _check_epochs(state["epochs"], state["position"]["until"])
    _check_end(state["over"], state["packs"])
    _check_shards(state.get("shards", {}), settings.get("shards") or 0)


def _check_settings(theirs: Any, ours: dict) -> None:
    if not isinstance(theirs, dict):
        raise ValueError(f"the state's settings are {type(theirs).__name__}, not a dict")
    for name in sorted(set(ours) | set(theirs)):
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the state was made with {name}={theirs.get(name)!r}, "
                f"this dataset has {name}={ours.get(name)!r}: give both the same"
            )


def _check_position(position: Any) -> None:
    if not isinstance(position, dict) or set(position) != set(POSITION):
        raise ValueError(f"the state's position must have the fields {POSITION}")
    for name in POSITION:
        value = position[name]
        if not is_count(value) and not (name == "until" and value is None):
            raise ValueError(f"the state's {name} is {value!r}: expected a number from 0")


def _check_epochs(epochs: Any, until: Any) -> None:
    if (epochs, until) == (None, None):
        return
    if not (is_count(epochs) and is_count(until) and 1 <= epochs <= until):
        raise ValueError(f"the state's epochs={epochs!r} and until={until!r} contradict each other")


def _check_end(over: Any, packs: Any) -> None:
    if not isinstance(over, bool):
        raise ValueError(f"the state's over is {over!r}: expected true or false")
    if packs is not None and not is_count(packs):
        raise ValueError(f"the state's packs is {packs!r}: expected a number from 0, or none")


def _check_shards(shards: Any, count: int) -> None:
    if not isinstance(shards, dict):
        raise ValueError(f"the state's shards are {type(shards).__name__}, not a dict")
    names = {str(number) for number in range(count)}
    for name, at in shards.items():
        if name not in names:
            raise ValueError(f"the state names a shard {str(name)[:20]!r}, there are {count}")
        if not isinstance(at, dict) or set(at) - {"given"} != {"made", "state", "ended"}:
            raise ValueError(f"the state of shard {name} must have the fields made, state, ended")
        if not is_count(at["made"]) or not isinstance(at["ended"], bool):
            raise ValueError(f"the state of shard {name} has made={at['made']!r}, not a number")
        given = at.get("given", [])
        if not isinstance(given, list) or not all(map(is_count, given)):
            raise ValueError(f"the state of shard {name} has given={given!r}, not numbers from 0")


def pass_end(state: dict, epochs: int | None) -> int | None:
    """Give the epoch before which a state's pass ends if it is made of so many; None: never.

    >>> state = {"epochs": 1, "position": {"epoch": 0, "start": 0, "index": 9, "until": 1}}
    >>> pass_end(state, 3)
    3
    """
    first = 0 if state["epochs"] is None else state["position"]["until"] - state["epochs"]
    at, until = state["position"]["epoch"], None if epochs is None else first + epochs
    if until is not None and at >= until:
        raise ValueError(
            f"the state was made with epochs={state['epochs']} and stands in epoch {at - first}, "
            f"counted from 0; this dataset has epochs={epochs}, nothing would be left: raise it"
        )
    return until


def is_over(state: dict, epochs: int | None, packs: int | None) -> bool:
    """Whether a state's pass came to its end, and may be no longer here than it was there."""
    return state["over"] and (state["epochs"], state["packs"]) == (epochs, packs)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def merge_states(states: Iterable[dict]) -> dict:
    """Join what the ranks know of a sharded run into the one state of the run.

    >>> a, b = ({"position": {"index": 4}, "shards": {str(i): "x"}} for i in range(2))
    >>> merge_states([a, b])
    {'position': {'index': 4}, 'shards': {'0': 'x', '1': 'x'}}
    """
    states = list(states)
    if not states:
        raise ValueError("no state to merge")
    whole = {name: value for name, value in states[0].items() if name != "shards"}
    for state in states[1:]:
        for name, value in whole.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the ranks stand at different places: {name} is {value!r} on the first, "
                    f"{state.get(name)!r} on another"
                )
    shards: dict[str, Any] = {}
    for shard, at in (item for state in states for item in state.get("shards", {}).items()):
        if shards.setdefault(shard, at) != at:
            raise ValueError(f"two ranks name different places of shard {shard}: each has its own")
    return (
        {**whole, "shards": dict(sorted(shards.items(), key=lambda item: int(item[0])))}
        if shards
        else whole
    )
