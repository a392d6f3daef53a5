"""A decoder's operations between products and attention on a GPU: norms, rotary positions, gates.

Each kernel starts by adding a product's parts in order (``linear.sums``), which saves a kernel. A program works on one
token, so a token's bits do not depend on what shares the pass. Extra programs of norms and gates prefetch the next
product's weights into the L2 cache (``prefetch.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from forerun.kernels.gpu.pass_tables import PassTables
from forerun.kernels.gpu.prefetch import Ahead, prefetch

GATE_COLUMNS = tl.constexpr(1024)
"""Columns of a gated row per program."""
NORM_WARPS, GATE_WARPS = tl.constexpr(8), tl.constexpr(4)
"""Warps of a program; a gating one then has eight numbers per thread."""
PARTS_AHEAD = tl.constexpr(8)
"""Parts of a product loaded before any is added: a load costs as much as hundreds of sums. On an H200, the norms of
Llama-3-8B's shape cost 0.38 ms per pass with this, and 0.46 ms one by one."""


class Summands(NamedTuple):
    """A product's parts before they are added, ``[parts, n, O]`` of any type, and its bias ``[O]``, if any."""

    parts: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor, int, int, torch.Tensor, bool]:
        """What kernels need to add them: the parts, their number, the step between them, the bias if there is one."""
        parts, bias = self
        return parts, len(parts), parts.stride(0), parts if bias is None else bias, bias is not None


class NormWeight(NamedTuple):
    """A root mean square norm: ``weight`` ``[columns]``, its ``offset`` (1 for Gemma's), ``eps`` on the mean square."""

    weight: torch.Tensor
    offset: int
    eps: float


class RotaryHeads(NamedTuple):
    """Norms of each head of queries and keys (both or neither), and rotary angles, float32 ``[n, half]``, or None."""

    heads: int
    kv_heads: int
    dim: int
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None


def add_norm(
    x: torch.Tensor, added: Summands | None, after: NormWeight | None, before: NormWeight | None, factor: float,
    dtype: torch.dtype, following: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Add a product to the residual stream ``x``, float32 ``[n, columns]``, in place; return the sum normalised.
    ``after``, ``before``: norms of the summand, the sum; ``factor``: on the summand; ``following``: weights to
    prefetch."""
    n, columns = x.shape
    y = torch.empty(n, columns, dtype=dtype, device=x.device)
    one, two = after or before or NormWeight(x, 0, 0.0), before or after or NormWeight(x, 0, 0.0)
    ahead = Ahead.of(following, x)
    _add_norm[(n + ahead.programs,)](
        x, *(added or Summands(x[None])).arguments, one.weight, two.weight, y, columns, factor, one.eps, two.eps,
        added is not None, after is not None, before is not None, one.offset, two.offset, n, *ahead.arguments,
        triton.next_power_of_2(columns), enable_fp_fusion=False, num_warps=NORM_WARPS.value,
    )  # fmt: skip
    return y


def norm_all_heads(qkv: Summands, q_norm: NormWeight, k_norm: NormWeight) -> Summands:
    """Add a product's parts, and normalise queries and keys over all their heads: float32 ``[1, n, O]``."""
    y, first = torch.empty(qkv.parts.shape[1:], dtype=torch.float32, device=qkv.parts.device), 0
    for norm, blocks in ((q_norm, 1), (k_norm, 2)):  # the second also copies values, as many as keys
        columns = len(norm.weight)
        _norm_columns[(len(y), blocks)](
            *qkv.arguments, y.shape[1], norm.weight, y, first, columns, norm.eps, norm.offset,
            triton.next_power_of_2(columns), enable_fp_fusion=False, num_warps=NORM_WARPS.value,
        )  # fmt: skip
        first += columns
    return Summands(y[None])


def rotate_and_store(
    layer: int, qkv: Summands, how: RotaryHeads, places: PassTables, dtype: torch.dtype
) -> torch.Tensor:
    """Norm and rotate queries and keys; store keys and values for ``layer``; return queries ``[1, H, n, d]``."""
    parts = qkv.parts
    n, width = parts.shape[1:]
    q = torch.empty(n, how.heads, how.dim, dtype=dtype, device=parts.device)
    half = 0 if how.cos is None else how.cos.shape[1]
    none = NormWeight(parts, 0, 0.0)
    q_norm, k_norm = how.q_norm or none, how.k_norm or none
    _rotate_and_store[(n, how.heads + 2 * how.kv_heads)](
        *qkv.arguments, width, q_norm.weight, k_norm.weight, parts if how.cos is None else how.cos,
        parts if how.sin is None else how.sin, q, places.addresses[layer], places.strides[layer], places.tokens,
        q_norm.eps, how.heads, how.kv_heads, how.dim, half, q_norm.offset, how.q_norm is not None,
        triton.next_power_of_2(how.dim), enable_fp_fusion=False, num_warps=1,
    )  # fmt: skip
    return q.transpose(0, 1)[None]


def gate(gate_up: Summands, silu: bool, dtype: torch.dtype, following: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``activation(gate) * up``, ``[n, inner]``, from a product ``[n, 2 * inner]`` with both side by side. The
    activation is SiLU, or GELU in its tanh approximation. ``following``: weights of the next product, to prefetch."""
    _, n, both = gate_up.parts.shape
    y = torch.empty(n, both // 2, dtype=dtype, device=gate_up.parts.device)
    ahead, programs = Ahead.of(following, y), triton.cdiv(both // 2, GATE_COLUMNS.value)
    _gate[(n + triton.cdiv(ahead.programs, programs), programs)](
        *gate_up.arguments, y, both // 2, n, *ahead.arguments, silu, enable_fp_fusion=False,
        num_warps=GATE_WARPS.value,
    )  # fmt: skip
    return y


@triton.jit
def _summed(parts, count, step, bias, BIAS: tl.constexpr, at, inside, here):
    total = at * 0.0
    for first in range(0, count, PARTS_AHEAD):
        for i in tl.static_range(PARTS_AHEAD):
            there = inside & (at * 0 + first + i < count)
            total += tl.load(parts + (first + i) * step + here + at, there, 0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + at, inside, 0.0).to(tl.float32)
    return total


@triton.jit
def _scale(y, columns, eps):
    """Return one over the root mean square of ``columns`` numbers; padding must be 0."""
    return 1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / columns + eps)


@triton.jit(do_not_specialize=["count", "step", "n", "following_bytes"])
def _add_norm(
    x, parts, count, step, bias, BIAS: tl.constexpr, after, before, y, columns, factor, after_eps, before_eps,
    ADDED: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, AFTER_OFFSET: tl.constexpr,
    BEFORE_OFFSET: tl.constexpr, n, following, following_bytes, AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    if AHEAD and tl.program_id(0) >= n:
        prefetch(following, following_bytes, tl.program_id(0) - n, 32 * NORM_WARPS)
        return
    here, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, WIDE)
    inside = at < columns
    stream = tl.load(x + here + at, inside, 0.0)
    if ADDED:
        added = _summed(parts, count, step, bias, BIAS, at, inside, here)
        if AFTER:
            weight = tl.load(after + at, inside, 0.0).to(tl.float32) + AFTER_OFFSET
            added = added * _scale(added, columns, after_eps) * weight
        stream += added * factor
        tl.store(x + here + at, stream, inside)
    if BEFORE:
        weight = tl.load(before + at, inside, 0.0).to(tl.float32) + BEFORE_OFFSET
        stream = stream * _scale(stream, columns, before_eps) * weight
    tl.store(y + here + at, stream.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count", "step"])
def _norm_columns(
    parts, count, step, bias, BIAS: tl.constexpr, width, w, y, first, columns, eps, OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Normalise one token's columns from ``first`` on; the second program copies as many after them."""
    here, block, at = tl.program_id(0).to(tl.int64) * width, tl.program_id(1), tl.arange(0, WIDE)
    inside, column = at < columns, first + block * columns + at
    number = _summed(parts, count, step, bias, BIAS, column, inside, here)
    if block == 0:
        weight = tl.load(w + at, inside, 0.0).to(tl.float32) + OFFSET
        number = number * _scale(number, columns, eps) * weight
    tl.store(y + here + column, number, inside)


@triton.jit(do_not_specialize=["count", "step"])
def _rotate_and_store(
    parts, count, step, bias, BIAS: tl.constexpr, width, q_norm, k_norm, cos, sin, q, addresses, strides, tokens, eps,
    heads, kv_heads, DIM: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, NORM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Process one head of one token: a query, a key or a value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    inside, here = at < DIM, token * width
    number = _summed(parts, count, step, bias, BIAS, head * DIM + at, inside, here)
    if head < heads + kv_heads:
        other_at = tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))
        other = number
        if HALF > 0:
            other = _summed(parts, count, step, bias, BIAS, head * DIM + other_at, inside, here)
        if NORM:
            scale = _scale(number, DIM, eps)
            number = number * scale * _head_weight(q_norm, k_norm, at, inside, head < heads, OFFSET)
            other = other * scale * _head_weight(q_norm, k_norm, other_at, inside, head < heads, OFFSET)
        if HALF > 0:
            angle = token * HALF + at % HALF
            cosine = tl.load(cos + angle, at < 2 * HALF, 1.0)
            sine = tl.load(sin + angle, at < 2 * HALF, 0.0)
            number = number * cosine + tl.where(at < HALF, -other, other) * sine
    if head < heads:
        tl.store(q + (token * heads + head) * DIM + at, number.to(q.dtype.element_ty), inside)
    else:
        row, slot = tl.load(tokens + token * 4), tl.load(tokens + token * 4 + 1).to(tl.int64)
        value = (head >= heads + kv_heads).to(tl.int64)
        memory = tl.load(addresses + row * 2 + value).to(tl.pointer_type(q.dtype.element_ty))
        kv_head = head - heads - value * kv_heads
        place = kv_head * tl.load(strides + row * 4 + 2 * value) + slot * tl.load(strides + row * 4 + 2 * value + 1)
        tl.store(memory + place + at, number.to(q.dtype.element_ty), inside)


@triton.jit
def _head_weight(q_norm, k_norm, at, inside, is_query, OFFSET: tl.constexpr):
    query = at * 0 + is_query.to(tl.int32) > 0
    weight = tl.load(q_norm + at, inside & query, 0.0).to(tl.float32)
    return weight + tl.load(k_norm + at, inside & ~query, 0.0).to(tl.float32) + OFFSET


@triton.jit(do_not_specialize=["count", "step", "n", "following_bytes"])
def _gate(
    parts, count, step, bias, BIAS: tl.constexpr, y, inner, n, following, following_bytes, AHEAD: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Process some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    if AHEAD and token >= n:
        program = (token - n) * tl.num_programs(1) + tl.program_id(1)
        prefetch(following, following_bytes, program, 32 * GATE_WARPS)
        return
    at = tl.program_id(1) * GATE_COLUMNS + tl.arange(0, GATE_COLUMNS)
    inside, here = at < inner, token * 2 * inner
    g = _summed(parts, count, step, bias, BIAS, at, inside, here)
    up = _summed(parts, count, step, bias, BIAS, at + inner, inside, here)
    if SILU:
        active = g / (1.0 + tl.exp(-g))
    else:
        active = 0.5 * g * (2.0 - 2.0 / (1.0 + tl.exp(1.5957691216057308 * (g + 0.044715 * g * g * g))))
    tl.store(y + token * inner + at, (active * up).to(y.dtype.element_ty), inside)
