"""A set of small integers that finds its largest member below a bound in a few instructions.

One bit per value in `low`, one bit per non-empty word of `low` in `high`:

    values   {3, 64, 130}
    low      [....1... | 1....... | ..1.....]     64 values a word
    high     [1 1 1 ...]                          64 words a word

so a search looks at one word, and where that is empty at one or two more: 4096 values a step.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiled import compiled

ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@intrinsic
def leading_zeros(typing_context, word):  # a numba signature: the first argument is numba's own
    """Count the zero bits above the highest one of a non-zero 64-bit word."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@compiled
def empty_bitset(largest):
    """Make the two levels of an empty set of values 0 .. largest."""
    words = (largest >> 6) + 1
    return np.zeros(words, np.uint64), np.zeros(((words - 1) >> 6) + 1, np.uint64)


@compiled
def add(low, high, value):
    word = value >> 6
    low[word] |= ONE << np.uint64(value & 63)
    high[word >> 6] |= ONE << np.uint64(word & 63)


@compiled
def discard(low, high, value):
    word = value >> 6
    low[word] &= ~(ONE << np.uint64(value & 63))
    if low[word] == np.uint64(0):
        high[word >> 6] &= ~(ONE << np.uint64(word & 63))


@compiled
def contains(low, value):
    return (low[value >> 6] >> np.uint64(value & 63)) & ONE != np.uint64(0)


@compiled
def largest_at_most(low, high, bound):
    """Find the largest member <= bound, or -1."""
    word = bound >> 6
    bits = low[word] & (ALL >> np.uint64(63 - (bound & 63)))
    if bits == np.uint64(0):
        word = _word_before(low, high, word)
        if word < 0:
            return np.int64(-1)
        bits = low[word]
    return (word << 6) + 63 - leading_zeros(bits)


@compiled
def _word_before(low, high, word):
    """Find the last non-empty word of `low` before `word`, or -1."""
    word -= 1
    if word < 0:
        return np.int64(-1)
    top = word >> 6
    bits = high[top] & (ALL >> np.uint64(63 - (word & 63)))
    while bits == np.uint64(0):
        top -= 1
        if top < 0:
            return np.int64(-1)
        bits = high[top]
    return (top << 6) + 63 - leading_zeros(bits)
