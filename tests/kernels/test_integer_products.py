"""Packed weights by integers: the bits of the products written out in numpy, in any pass, on any thread."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.gguf_blocks import NAMES, blocks
from support.linear_ops import layer, numbers, run_stored
from torch.nn import functional

from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS
from forerun.kernels.linear.linear import ADD, GATE, Weights, by_integers, product
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.runtime import vector_ir

pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

QUICK = ("Q4_1", "Q8_0", "Q4_K", "Q6_K")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in INTEGER_FORMATS]
"""Each format compiles a kernel of its own."""
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 33, 64)


Array = np.ndarray[Any, Any]
IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
FP4 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
ONE = np.float32(1)


class Parts(NamedTuple):
    """A matrix in blocks of 32 columns: a weight is ``scale * small * integer + minimum * small_minimum``.

    Attributes:
        integers: ``[rows, blocks, 32]``.
        scale, minimum: float32 ``[rows, blocks]``.
        small, small_minimum: of every 16 columns, ``[rows, blocks, 2]``.
    """

    integers: Array
    scale: Array
    small: Array
    minimum: Array
    small_minimum: Array


def quantised(x: Array) -> tuple[Array, Array]:
    """Integers ``[tokens, blocks, 32]`` and scales ``[tokens, blocks]`` of floats ``[tokens, K]``."""
    x = x.reshape(len(x), -1, 32)
    size = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(size < 2.0**-120, np.float32(0), np.float32(127) / size)
    return np.rint(x * inverse[..., None]).astype(np.int64), size / np.float32(127)


def product_in_numpy(x: Array, rows: Array, name: str, bias: Array) -> Array:
    """``x @ weights.T + bias`` ``[tokens, rows]``, block by block as the kernels add."""
    (integers, scales), parts = quantised(x), PARTS[name](rows)
    total = np.broadcast_to(bias, (len(x), len(rows))).astype(np.float32)
    halves = integers.reshape(*integers.shape[:2], 2, 16)
    for block in range(integers.shape[1]):
        weights = parts.integers[:, block].reshape(-1, 2, 16).astype(np.int64)
        sums = np.einsum("thi,rhi->trh", halves[:, block], weights)
        scale = scales[:, block, None]
        found = (sums * parts.small[:, block]).sum(-1).astype(np.float32) * scale
        total = fma(found, parts.scale[:, block], total)
        of_inputs = halves[:, block].sum(-1)
        if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            found = of_inputs.sum(-1).astype(np.float32)[:, None] * scale
            total = fma(parts.minimum[:, block], found, total)
        elif name == "Q2_K":
            found = (of_inputs[:, None] * parts.small_minimum[:, block]).sum(-1).astype(np.float32) * scale
            total = fma(found, parts.minimum[:, block], total)
    return total


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` of float32, rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    return np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def _blocks(rows: Array, size: int) -> Array:
    return rows.reshape(len(rows), -1, size)


def _half(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _parts(integers: Array, scale: Array, small: Any = 1, minimum: Any = 0.0, small_minimum: Any = 1) -> Parts:
    """By blocks of 32 columns, from whole blocks; ``small`` is of every 16."""
    count, blocks = len(integers), integers[0].size // 32
    shapes = (count, blocks, 32), (count, blocks), (count, blocks, 2), (count, blocks), (count, blocks, 2)
    every = integers, scale, small, minimum, small_minimum
    found = []
    for value, shape in zip(every, shapes, strict=True):
        value = np.asarray(value)
        if value.ndim > 0 and value.size < np.prod(shape):  # of a block of 256
            value = np.repeat(value.reshape(count, -1), np.prod(shape) // value.size, axis=-1)
        found.append(value.reshape(shape) if value.ndim else np.broadcast_to(value, shape))
    return Parts(found[0], found[1].astype(np.float32), found[2], found[3].astype(np.float32), found[4])


def _nibbles(packed: Array, size: int) -> Array:
    """Low halves of every ``size`` bytes, then their high halves."""
    packed = packed.reshape(*packed.shape[:-1], -1, 1, size)
    return ((packed >> np.array([[0], [4]], np.uint8)) & 15).reshape(*packed.shape[:-3], -1).astype(np.int64)


def _bits(packed: Array, shifts: range, mask: int) -> Array:
    """Some bits of each byte, for all bytes, then the bits after them."""
    return ((packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & mask).astype(np.int64)


def _fifths(blocks: Array, at: int) -> Array:
    word = np.ascontiguousarray(blocks[..., at : at + 4]).view(np.uint32)
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int64) << 4


def _q4_0(rows: Array) -> Parts:
    b = _blocks(rows, 18)
    return _parts(_nibbles(b[..., 2:], 16) - 8, _half(b, 0))


def _q4_1(rows: Array) -> Parts:
    b = _blocks(rows, 20)
    return _parts(_nibbles(b[..., 4:], 16), _half(b, 0), minimum=_half(b, 2))


def _q5_0(rows: Array) -> Parts:
    b = _blocks(rows, 22)
    return _parts((_nibbles(b[..., 6:], 16) | _fifths(b, 2)) - 16, _half(b, 0))


def _q5_1(rows: Array) -> Parts:
    b = _blocks(rows, 24)
    return _parts(_nibbles(b[..., 8:], 16) | _fifths(b, 4), _half(b, 0), minimum=_half(b, 2))


def _q8_0(rows: Array) -> Parts:
    b = _blocks(rows, 34)
    return _parts(b[..., 2:].astype(np.int8).astype(np.int64), _half(b, 0))


def _iq4_nl(rows: Array) -> Parts:
    b = _blocks(rows, 18)
    return _parts(IQ4[_nibbles(b[..., 2:], 16)], _half(b, 0))


def _mxfp4(rows: Array) -> Parts:
    b = _blocks(rows, 17)
    return _parts(FP4[_nibbles(b[..., 1:], 16)], np.ldexp(ONE, b[..., 0].astype(np.int64) - 128))


def _iq4_xs(rows: Array) -> Parts:
    b = _blocks(rows, 136)
    high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16).astype(np.int64)
    low = b[..., 4:8].astype(np.int64)
    small = np.stack(
        [((low[..., k // 2] >> k % 2 * 4) & 15) | ((high[..., 0] >> 2 * k) & 3) << 4 for k in range(8)], -1
    )
    scale = _half(b, 0)[..., None] * (small - 32).astype(np.float32)
    return _parts(IQ4[_nibbles(b[..., 8:], 16)], scale)


def _with_six_bit_scales(b: Array, integers: Array) -> Parts:
    """Of Q4_K and Q5_K."""
    first, second, third = (b[..., at : at + 4].astype(np.int64) for at in (4, 8, 12))
    small = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], -1).astype(np.float32)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], -1).astype(np.float32)
    return _parts(integers, _half(b, 0)[..., None] * small, minimum=-_half(b, 2)[..., None] * minima)


def _q4_k(rows: Array) -> Parts:
    b = _blocks(rows, 144)
    return _with_six_bit_scales(b, _nibbles(b[..., 16:], 32))


def _q5_k(rows: Array) -> Parts:
    b = _blocks(rows, 176)
    fifth = _bits(b[..., 16:48], range(8), 1).reshape(*b.shape[:2], 256) << 4
    return _with_six_bit_scales(b, _nibbles(b[..., 48:], 32) | fifth)


def _q6_k(rows: Array) -> Parts:
    b = _blocks(rows, 210)
    high = _bits(b[..., 128:192].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3).reshape(*b.shape[:2], 256) << 4
    return _parts((_nibbles(b[..., :128], 64) | high) - 32, _half(b, 208), b[..., 192:208].astype(np.int8).astype(int))


def _q2_k(rows: Array) -> Parts:
    b = _blocks(rows, 84)
    integers = _bits(b[..., 16:80].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3)
    small = b[..., :16].astype(int)
    return _parts(integers, _half(b, 80), small & 15, -_half(b, 82), small >> 4)


def _q3_k(rows: Array) -> Parts:
    b = _blocks(rows, 110)
    low = _bits(b[..., 32:96].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3).reshape(*b.shape[:2], 256)
    high = _bits(b[..., :32], range(8), 1).reshape(*b.shape[:2], 256)
    fours = _nibbles(b[..., 96:104], 8)
    twos = _bits(b[..., 104:108], range(0, 8, 2), 3).reshape(*b.shape[:2], 16)
    return _parts((low | high << 2) - 4, _half(b, 108), (fours | twos << 4) - 32)


PARTS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
    "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Integers and scales of a matrix's rows, by the format's name."""


def run(x: torch.Tensor, weights: Sequence[tuple[str, torch.Tensor]], *biases: Any, **how: Any) -> torch.Tensor:
    return run_stored(x, weights, *biases, quantised=True, **how)


def written_out(x: torch.Tensor, name: str, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    start = torch.zeros(len(rows)) if bias is None else bias
    return torch.from_numpy(product_in_numpy(x.numpy(), rows.numpy(), name, start.numpy()))


def test_every_format_with_integers_is_computed_by_them():
    assert set(NAMES) - set(INTEGER_FORMATS) == {"F32", "F16", "BF16"}
    assert set(PARTS) == set(INTEGER_FORMATS)
    rows = torch.zeros(1, 256, dtype=torch.uint8)
    assert [by_integers(Weights(rows, name, None, True)) for name in ("Q4_K", "F16", "BF16")] == [True, False, False]
    assert not by_integers(Weights(rows, "Q4_K"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(64, 256), (50, 512), (7, 256), (129, 768)], ids=str)
def test_the_bits_of_the_products_written_out(name, shape):
    rows, weights = blocks(name, *shape)
    bias, x = numbers(shape[0], seed=1), numbers(64, shape[1], seed=2)
    x[5] = 0  # a block of zeros has no scale
    x[6, :40] *= 1e-38
    x[7, 3] = 1e30
    expected = written_out(x, name, rows, bias)
    for n in SIZES:
        for first in sorted({0, 64 - n}):
            found = run(x[first : first + n], [(name, rows)], [bias])
            assert torch.equal(found, expected[first : first + n]), (n, first)
    exact = x.double() @ weights.double().T + bias.double()
    assert float((expected - exact)[8:].norm() / exact[8:].norm()) < 0.02


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", pytest.param("Q2_K", marks=pytest.mark.matrix)])
def test_the_largest_integers_of_both_overflow_nothing(name):
    rows, _ = blocks(name, 16, 256)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        rows[:] = byte
        scales = {"Q8_0": range(0, 272, 34), "Q4_K": (0,), "Q6_K": (208,), "Q2_K": (80,)}[name]
        for at in scales:
            rows[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        if name in ("Q4_K", "Q2_K"):
            at = scales[0] + 2
            rows[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        x = torch.stack([torch.ones(256), -torch.ones(256)] * 5)
        expected = written_out(x, name, rows)
        for n in (1, 2, 4, 10):
            assert torch.equal(run(x[:n], [(name, rows)]), expected[:n]), byte


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [1, 12])
def test_what_is_not_finite_gives_outputs_that_are_not(bad, n):
    rows, _ = blocks("Q4_1", 16, 64)
    x = numbers(n, 64, seed=1)
    expected = run(x, [("Q4_1", rows)])
    x[0, 40] = bad
    found = run(x, [("Q4_1", rows)])
    assert not found[0].isfinite().any() and torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize("columns", [32, 96, 288, 544])
def test_rows_of_any_number_of_blocks(columns):
    (rows, _), x = blocks("Q8_0", 24, columns), numbers(14, columns, seed=2)
    for n in (1, 4, 14):
        assert torch.equal(run(x[:n], [("Q8_0", rows)]), written_out(x[:n], "Q8_0", rows))


@pytest.mark.parametrize("n", [1, 4, 30])
def test_threads_and_shares_change_nothing(n):
    (rows, _), x = blocks("Q4_1", 130, 256), numbers(n, 256, seed=2)
    expected = written_out(x, "Q4_1", rows)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for share in (1, 4, 99):
            assert torch.equal(run(x, [("Q4_1", rows)], share=share), expected)


MIXED = [("Q4_1", "Q8_0", "Q4_1"), ("F16", "Q8_0", "Q4_1"), ("Q4_1", "F16", "Q8_0")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [1, 3, 6, 9, 29])
@pytest.mark.parametrize("names", MIXED, ids="-".join)
def test_matrices_of_several_formats_over_the_same_tokens(n, names):
    """Those without integers have the bits of float32 weights."""
    pairs = [blocks(name, outs, 256, seed=outs) for name, outs in zip(names, (40, 16, 9), strict=True)]
    biases, x = [numbers(len(rows), seed=9) for rows, _ in pairs], numbers(n, 256, seed=2)
    found = run(x, [(name, rows) for name, (rows, _) in zip(names, pairs, strict=True)], biases)
    expected = [
        layer(x, [weights], [bias]) if name == "F16" else written_out(x, name, rows, bias)
        for name, (rows, weights), bias in zip(names, pairs, biases, strict=True)
    ]
    assert torch.equal(found, torch.cat(expected, 1))


@pytest.mark.parametrize("n", [1, 5, 29])
@pytest.mark.parametrize("outs", [48, 37])
def test_sums_are_added_to_what_is_there(n, outs):
    (rows, _), x, before = blocks("Q8_0", outs, 256), numbers(n, 256, seed=2), numbers(n, outs, seed=3)
    expected = before + written_out(x, "Q8_0", rows)
    assert torch.equal(run(x, [("Q8_0", rows)], mode=ADD, onto=before.clone()), expected)


@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("F16", "Q8_0"), ("Q8_0", "F16")], ids="-".join)
@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("outs", [48, 37])
def test_gates_are_activated_and_multiplied(outs, activation, names):
    pairs = [blocks(name, outs, 256, seed=i) for i, name in enumerate(names)]
    biases, x = [numbers(outs, seed=5), numbers(outs, seed=6)], numbers(40, 256, seed=2)
    given = [(name, rows) for name, (rows, _) in zip(names, pairs, strict=True)]
    how: Any = {"mode": GATE, "activation": activation}
    gate, up = (run(x, [each], [bias]) for each, bias in zip(given, biases, strict=True))
    active = functional.silu(gate) if activation == SILU else functional.gelu(gate, approximate="tanh")
    expected = run(x, given, biases, **how)
    assert torch.allclose(expected, active * up, rtol=1e-4, atol=1e-3)  # GELU cancels
    for n in (1, 2, 5, 9, 12, 16, 39):
        assert torch.equal(run(x[-n:], given, biases, **how), expected[-n:])


def test_a_product_by_itself_has_the_same_bits():
    (rows, _), x = blocks("Q4_K", 40, 512), numbers(9, 512, seed=2)
    for n in (1, 9):
        assert torch.equal(product(x[:n], Weights(rows, "Q4_K", None, True)), written_out(x[:n], "Q4_K", rows))
    assert not torch.equal(product(x, Weights(rows, "Q4_K")), written_out(x, "Q4_K", rows))
    assert np.isfinite(product(x, Weights(rows, "Q4_K")).numpy()).all()
