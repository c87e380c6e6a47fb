"""A two-level bitset of small integers that finds its largest member up to a bound quickly.

One bit per value in `low`, one bit per non-empty word of `low` in `high`:

    values   {3, 64, 130}
    low      [...1.... | 1....... | ..1.....]     64 values per word
    high     [1 1 1 ...]                          64 words per word

A search reads one word, and if that is empty one or two more: 4096 values per step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..numba_jit import jit

unsigned = np.uint64
"""An index that cannot be negative: numba omits its sign test, a tenth of the time."""
ZERO = np.uint64(0)
ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def _leading_zeros(typing_context, word):  # the first argument is numba's own
    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


leading_zeros: Any = intrinsic(_leading_zeros)
"""Count the zero bits above the highest one of a non-zero 64-bit word."""


@jit
def empty_bitset(largest):
    """Return the two levels of an empty set of values 0 .. largest."""
    words = (largest >> 6) + 1
    return np.zeros(words, np.uint64), np.zeros(((words - 1) >> 6) + 1, np.uint64)


@jit
def add(low, high, value):
    word = value >> 6
    low[unsigned(word)] |= ONE << np.uint64(value & 63)
    high[unsigned(word >> 6)] |= ONE << np.uint64(word & 63)


@jit
def discard(low, high, value):
    word = value >> 6
    low[unsigned(word)] &= ~(ONE << np.uint64(value & 63))
    if low[unsigned(word)] == ZERO:
        high[unsigned(word >> 6)] &= ~(ONE << np.uint64(word & 63))


@jit
def contains(low, value):
    return (low[unsigned(value >> 6)] >> np.uint64(value & 63)) & ONE != ZERO


@jit
def largest_at_most(low, high, bound):
    """Find the largest member <= bound, or -1."""
    word = bound >> 6
    bits = low[unsigned(word)] & (ALL >> np.uint64(63 - (bound & 63)))
    # A return of its own: merged with the rare path below, a search takes twice as long.
    if bits != ZERO:
        return (word << 6) + 63 - leading_zeros(bits)
    word -= 1
    if word < 0:
        return np.int64(-1)
    top = word >> 6
    bits = high[unsigned(top)] & (ALL >> np.uint64(63 - (word & 63)))
    while bits == ZERO:
        top -= 1
        if top < 0:
            return np.int64(-1)
        bits = high[unsigned(top)]
    word = (top << 6) + 63 - leading_zeros(bits)
    return (word << 6) + 63 - leading_zeros(low[unsigned(word)])
