"""Checks of arguments that many public classes have: integers, counts and flags."""

from __future__ import annotations

import numpy as np


def check_ints(**settings: int) -> list[int]:
    """Return settings as Python integers, or raise naming the one that is not an integer.

    >>> check_ints(budget=np.int64(8), pool=4)
    [8, 4]
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} {value!r} must be an integer")
    return [int(value) for value in settings.values()]


def check_counts(**settings: int | None) -> list[int | None]:
    """Return settings that are None or at least 1."""
    for name, value in settings.items():
        if value is not None and check_ints(**{name: value})[0] < 1:
            raise ValueError(
                f"{name}={value}: pass at least 1, or None{' for no end' * (name == 'epochs')}"
            )
    return [None if value is None else int(value) for value in settings.values()]


def check_flags(**flags: bool) -> list[bool]:
    """Return settings that are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}={value!r}: pass True or False")
    return [bool(value) for value in flags.values()]
