"""One token of each sequence through a convolution or a gated delta rule, on states in place.

    x [B, C] ─▶ states[rows]  ─▶ out [B, C]     a program reads and writes a part of one row's state

Gathering the states of a step, and writing them back, would read and write all of them twice more.
Rows may occur twice only where nobody reads what becomes of them.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .swiglu import silu

_CHANNELS = 256
"""Channels of a convolution per program."""
_VALUES = 64
"""Values of a delta rule's state per program, for each of its keys."""


@triton.jit(do_not_specialize=["x_row"])
def _conv_kernel(
    x, states, rows, weight, bias, out, num_channels, x_row, x_channel,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Shift the last inputs of some channels by one, and weigh the newest."""
    sequence = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < num_channels
    places = tl.arange(0, PLACES)[None, :]
    is_new, is_kept = places == WIDTH - 1, mask[:, None] & (places < WIDTH - 1)
    state = states + (tl.load(rows + sequence) * num_channels + channels) * WIDTH
    newest = tl.load(x + sequence * x_row + channels * x_channel, mask=mask, other=0.0)
    newest = newest.to(weight.dtype.element_ty).to(tl.float32)
    kept = tl.load(state[:, None] + places + 1, mask=is_kept, other=0.0).to(tl.float32)
    inputs = tl.where(is_new, newest[:, None], kept)
    tap = places + (TAPS - WIDTH)
    is_tap = mask[:, None] & (places < WIDTH) & (tap >= 0)
    weights = tl.load(weight + channels[:, None] * TAPS + tap, mask=is_tap, other=0.0)
    total = tl.sum(inputs * weights.to(tl.float32), 1)
    if TAPS > WIDTH:  # the oldest input leaves the state in this step
        oldest = tl.load(state, mask=mask, other=0.0).to(tl.float32)
        total += oldest * tl.load(weight + channels * TAPS, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all of the state is read
    tl.store(state[:, None] + places, inputs, mask=is_new & mask[:, None] | is_kept)
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if SILU:
        total = silu(total)
    tl.store(out + sequence * num_channels + channels, total, mask=mask)


def conv_step(
    x: Tensor, states: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """Return a causal depthwise convolution at the next input of each sequence.

    Args:
        x: [B, C].
        states: [R, C, W], each row's last W inputs, updated in place.
        rows: int64 [B], the row of each sequence.
        weight: [C, K], at most W + 1 taps; silu: whether SiLU follows.
    """
    (batch, channels), (_, taps), width = x.shape, weight.shape, states.shape[-1]
    if states.shape[1] != channels or taps > width + 1 or not states.is_contiguous():
        raise ValueError(f"{taps} taps do not fit states {list(states.shape)} of {channels} inputs")
    out = x.new_empty(batch, channels)
    grid = batch, triton.cdiv(channels, _CHANNELS)
    _conv_kernel[grid](
        x, states, rows, weight.contiguous(), bias, out, channels, *x.stride(),
        WIDTH=width, TAPS=taps, PLACES=triton.next_power_of_2(width), SILU=silu,
        BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _delta_rule_kernel(
    q, k, v, decay, beta, states, rows, out, scale, num_heads, num_keys, num_values,
    q_row, q_head, k_row, k_head, v_row, v_head,
    NORMALIZE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decay a head's state, correct what it holds for the key, and read it by the query."""
    sequence = (tl.program_id(0) // num_heads).to(tl.int64)
    head = tl.program_id(0) % num_heads
    keys, values = tl.arange(0, KEYS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = keys < num_keys, values < num_values
    query = tl.load(q + sequence * q_row + head * q_head + keys, is_key, 0.0).to(tl.float32)
    key = tl.load(k + sequence * k_row + head * k_head + keys, is_key, 0.0).to(tl.float32)
    value = tl.load(v + sequence * v_row + head * v_head + values, is_value, 0.0).to(tl.float32)
    if NORMALIZE:
        query *= tl.rsqrt(tl.sum(query * query) + 1e-6)
        key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
    per_head = sequence * num_heads + head
    row_head = tl.load(rows + sequence) * num_heads + head
    place = row_head * num_keys * num_values + keys[:, None] * num_values + values[None, :]
    mask = is_key[:, None] & is_value[None, :]
    state = tl.load(states + place, mask=mask, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(decay + per_head).to(tl.float32))
    held = tl.sum(state * key[:, None], 0)
    change = (value - held) * tl.load(beta + per_head).to(tl.float32)
    state += key[:, None] * change[None, :]
    tl.store(states + place, state, mask=mask)
    read = tl.sum(state * (query * scale)[:, None], 0)
    tl.store(out + per_head * num_values + values, read, mask=is_value)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: Tensor,
    normalize: bool,
) -> Tensor:
    """Return what a gated delta rule reads for the next token of each sequence, [B, H, V].

    Args:
        q: [B, H, K], and keys k alike; v: values [B, H, V].
        decay: [B, H], the logarithm of what remains of a state; beta: [B, H], how far it is
            corrected.
        states: [R, H, K, V], updated in place.
        rows: int64 [B], the row of each sequence.
        normalize: whether queries and keys are divided by their norms.
    """
    batch, heads, num_keys = k.shape
    num_values = v.shape[-1]
    if states.shape[1:] != (heads, num_keys, num_values) or not states.is_contiguous():
        raise ValueError(f"keys {list(k.shape)} do not fit states {list(states.shape)}")
    out = v.new_empty(batch, heads, num_values)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    block = min(_VALUES, triton.next_power_of_2(num_values))
    _delta_rule_kernel[batch * heads, triton.cdiv(num_values, block)](
        q, k, v, decay.contiguous(), beta.contiguous(), states, rows, out, num_keys**-0.5,
        heads, num_keys, num_values,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        NORMALIZE=normalize, KEYS=triton.next_power_of_2(num_keys), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
