"""The data state of a run, versioned JSON: check it before a resume, merge it over ranks.

    {"version": 1,  "settings": {...}, "fingerprint": "...", "epochs": 3, "max_packs": null,
     "finished": false,                                          whether the pass has ended
     "position": {"epoch", "epoch_start", "index", "end_epoch"}, packs below `index` were trained
                                                 (and "window", "window_start" after the first one)
     "shards": {"0": {...}, ...}}                                cursors, if lengths are unknown

It holds the settings that determine the sequence of packs, and the position in it. A state of
other data or settings is rejected with an error that names the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..ordering.rank_share import WINDOW

VERSION = 1
"""Incremented when the format changes, or when the same data and settings give other packs."""
FIELDS = {
    "version", "settings", "fingerprint", "epochs", "position", "max_packs", "finished", "shards",
    "worker",
}  # fmt: skip
OPTIONAL = {"shards", "worker"}
POSITION = ("epoch", "epoch_start", "index", "end_epoch")
WORKER = ("id", "num_workers", "num_packs", "epoch", "epoch_start")
LARGEST_EPOCH, LARGEST_INDEX = 1 << 31, 1 << 48
CURSOR = ("packs_since", "state", "ended", "counts", "packed_tokens", "skipped")
"""The state of a shard is `state` after `packs_since` more packs; the rest is for the report."""


def check_state(state: Any, settings: dict, fingerprint: str) -> None:
    """Raise if a state does not continue this run, naming the difference."""
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError("not a state of a PackedDataset: it has no version")
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this nopad reads version {VERSION}: "
            "resume with the nopad that wrote it, or start a new run"
        )
    if set(state) - FIELDS or FIELDS - OPTIONAL - set(state):
        raise ValueError(f"the state has the fields {sorted(state)}, expected {sorted(FIELDS)}")
    _check_settings(state["settings"], settings)
    if state["fingerprint"] != fingerprint:
        raise ValueError(
            "the state was made with other data: "
            f"fingerprint {state['fingerprint']}, here {fingerprint}"
        )
    _check_position(state["position"])
    _check_epochs(state["epochs"], state["position"]["end_epoch"])
    _check_end(state["finished"], state["max_packs"])
    _check_shards(state.get("shards", {}), settings.get("shards") or 0)
    _check_worker(state.get("worker"))


def _check_worker(worker: Any) -> None:
    if worker is None:
        return
    if not isinstance(worker, dict) or set(worker) not in ({*WORKER}, {*WORKER, *WINDOW}):
        raise ValueError(f"the state's worker must have the fields {WORKER}")
    for name, value in worker.items():
        if not is_non_negative_int(value) or value > LARGEST_INDEX:
            raise ValueError(f"the state's worker has {name}={value!r}: expected a small integer")
    if worker["id"] >= worker["num_workers"] or worker["epoch"] > LARGEST_EPOCH:
        raise ValueError(f"the state's worker {worker} does not exist")


def _check_settings(state_settings: Any, settings: dict) -> None:
    if not isinstance(state_settings, dict):
        raise ValueError(f"the state's settings are {type(state_settings).__name__}, not a dict")
    for name in sorted(set(settings) | set(state_settings)):
        if state_settings.get(name) != settings.get(name):
            raise ValueError(
                f"the state was made with {name}={state_settings.get(name)!r}, "
                f"this dataset has {name}={settings.get(name)!r}: use the same for both"
            )


def _check_position(position: Any) -> None:
    fields = {*POSITION}, {*POSITION, *WINDOW}
    if not isinstance(position, dict) or set(position) not in fields:
        raise ValueError(f"the state's position must have the fields {POSITION}")
    for name, value in position.items():
        if not is_non_negative_int(value) and not (name == "end_epoch" and value is None):
            raise ValueError(f"the state's {name} is {value!r}: expected a non-negative integer")
    epoch, epoch_start, index, end_epoch = (position[name] for name in POSITION)
    if epoch > LARGEST_EPOCH or index > LARGEST_INDEX:
        raise ValueError(f"the state's epoch {epoch} and index {index} are beyond any run")
    planned_start = position.get("window_start", epoch_start)
    ordered = epoch_start <= planned_start <= index
    if not ordered or (end_epoch is not None and epoch > end_epoch):
        raise ValueError(
            f"the state's epoch {epoch} of {end_epoch}, which starts at pack {epoch_start}, and "
            f"its index {index} contradict each other"
        )


def _check_epochs(epochs: Any, end_epoch: Any) -> None:
    if (epochs, end_epoch) == (None, None):
        return
    integers = is_non_negative_int(epochs) and is_non_negative_int(end_epoch)
    if not (integers and 1 <= epochs <= end_epoch):
        raise ValueError(
            f"the state's epochs={epochs!r} and end_epoch={end_epoch!r} contradict each other"
        )


def _check_end(finished: Any, max_packs: Any) -> None:
    if not isinstance(finished, bool):
        raise ValueError(f"the state's finished is {finished!r}: expected true or false")
    if max_packs is not None and not is_non_negative_int(max_packs):
        raise ValueError(
            f"the state's max_packs is {max_packs!r}: expected a non-negative integer or null"
        )


def _check_shards(shards: Any, count: int) -> None:
    if not isinstance(shards, dict):
        raise ValueError(f"the state's shards are {type(shards).__name__}, not a dict")
    names = {str(number) for number in range(count)}
    for name, cursor in shards.items():
        if name not in names:
            raise ValueError(f"the state names a shard {str(name)[:20]!r}, there are {count}")
        if not isinstance(cursor, dict) or set(cursor) != set(CURSOR):
            raise ValueError(f"the state of shard {name} must have the fields {', '.join(CURSOR)}")
        _check_cursor(name, cursor)


def _check_cursor(shard: str, cursor: dict) -> None:
    if not isinstance(cursor["ended"], bool):
        raise ValueError(
            f"the state of shard {shard} has ended={cursor['ended']!r}: expected true or false"
        )
    for name in ("packs_since", "skipped"):
        if not is_non_negative_int(cursor[name]):
            raise ValueError(
                f"the state of shard {shard} has {name}={cursor[name]!r}: "
                "expected a non-negative integer"
            )
    for name in ("counts", "packed_tokens"):
        if not isinstance(cursor[name], list) or not all(map(is_non_negative_int, cursor[name])):
            raise ValueError(
                f"the state of shard {shard} has {name}={cursor[name]!r}: "
                "expected non-negative integers"
            )


def end_epoch_of(state: dict, epochs: int | None) -> int | None:
    """Return the epoch before which a state's pass ends if it has `epochs` epochs; None: never.

    >>> position = {"epoch": 0, "epoch_start": 0, "index": 9, "end_epoch": 1}
    >>> end_epoch_of({"epochs": 1, "position": position}, 3)
    3
    """
    position = state["position"]
    first = 0 if state["epochs"] is None else position["end_epoch"] - state["epochs"]
    end_epoch = None if epochs is None else first + epochs
    if end_epoch is not None and position["epoch"] >= end_epoch:
        raise ValueError(
            f"the state was made with epochs={state['epochs']} and is in epoch "
            f"{position['epoch'] - first}, counted from 0; this dataset has epochs={epochs}, "
            "no epochs are left: raise epochs="
        )
    return end_epoch


def check_packs_left(index: int, max_packs: int | None) -> None:
    """Raise if a pass of `max_packs` packs ends before pack `index`.

    >>> check_packs_left(5, 4)
    Traceback (most recent call last):
    ValueError: the state is at pack 5, max_packs=4: no packs are left, raise max_packs=
    """
    if max_packs is not None and index >= max_packs:
        raise ValueError(
            f"the state is at pack {index}, max_packs={max_packs}: "
            "no packs are left, raise max_packs="
        )


def is_finished(state: dict, epochs: int | None, max_packs: int | None) -> bool:
    """Return whether a state's pass has ended, with the same `epochs` and `max_packs` as here."""
    return state["finished"] and (state["epochs"], state["max_packs"]) == (epochs, max_packs)


def is_non_negative_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def merge_states(states: Iterable[dict]) -> dict:
    """Merge the states of all ranks of a streamed run into the state of the run.

    >>> a, b = ({"position": {"index": 4}, "shards": {str(i): "x"}} for i in range(2))
    >>> merge_states([a, b])
    {'position': {'index': 4}, 'shards': {'0': 'x', '1': 'x'}}
    """
    states = list(states)
    if not states:
        raise ValueError("no state to merge")
    merged = {name: value for name, value in states[0].items() if name != "shards"}
    for state in states[1:]:
        for name, value in merged.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the ranks are at different positions: {name} is {value!r} on the first, "
                    f"{state.get(name)!r} on another"
                )
    shards: dict[str, Any] = {}
    for shard, cursor in (item for state in states for item in state.get("shards", {}).items()):
        if shards.setdefault(shard, cursor) != cursor:
            raise ValueError(f"two ranks have different cursors of shard {shard}: one rank owns it")
    if not shards:
        return merged
    return {**merged, "shards": dict(sorted(shards.items(), key=lambda item: int(item[0])))}
