"""Weights as GGUF stores them, in any pass and on any thread: by floats the very bits that float32 weights of the same
numbers give, and by integers those of the products written out in numpy.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_blocks import NAMES, SCALES, blocks
from support.linear_ops import fma32, layer, numbers
from support.linear_ops import run_stored as run
from torch.nn import functional

from forerun.kernels.linear import linear
from forerun.kernels.linear.decoder_ops import LOOKUP, LookupOp
from forerun.kernels.linear.gguf_formats import GGUF_FORMATS
from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS
from forerun.kernels.linear.linear import product
from forerun.kernels.linear.linear_op import ADD, GATE
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.linear.weight_matrix import Weights, by_integers, matrix_of
from forerun.kernels.runtime import executor, vector_ir

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

QUICK = (("Q4_1", "Q8_0", "Q4_K"), ("Q4_1", "Q8_0", "Q4_K", "Q6_K"))
"""By floats, and by integers."""


def cases(quantised: bool, names: Any) -> list[Any]:
    """Each format compiles a kernel of its own: few of them do for ``make test``."""
    slow = [pytest.mark.matrix]
    return [pytest.param(name, quantised, marks=slow * (name not in QUICK[quantised])) for name in names]


CASES = [*cases(False, NAMES), *cases(True, INTEGER_FORMATS)]
SMALL_BLOCKS = [each.name for each in GGUF_FORMATS if each.words <= 32]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 25, 31, 33, 40, 64)
Array = np.ndarray[Any, Any]
ONE, NONE = b"\x00\x3c", bytes(2)
"""In float16."""
K_ONES = ONE + NONE + b"\1\1\1\1\0\0\0\0\1\1\1\1"
CHANGES: dict[str, tuple[dict[int, bytes], ...]] = {
    "Q4_0": ({0: ONE}, {2: b"\x99" * 16}), "Q4_1": ({0: ONE + NONE}, {2: NONE + b"\x11" * 16}, {0: NONE}),
    "Q5_0": ({0: ONE}, {2: b"\xff" * 4 + b"\x11" * 16}), "Q8_0": ({0: ONE}, {2: b"\1" * 32}),
    "Q5_1": ({0: ONE + NONE}, {2: NONE + bytes(4) + b"\x11" * 16}, {0: NONE}), "IQ4_NL": ({0: ONE}, {2: b"\x88" * 16}),
    "IQ4_XS": ({0: ONE + b"\xaa" * 2 + b"\x11" * 4}, {8: b"\x88" * 128}), "MXFP4": ({0: b"\x80"}, {1: b"\x11" * 16}),
    "Q2_K": ({80: ONE + NONE}, {0: b"\1" * 16 + b"\x55" * 64, 82: NONE}, {0: b"\x10" * 16, 80: NONE}),
    "Q3_K": ({108: ONE}, {0: b"\xff" * 32 + b"\x55" * 64 + b"\x11" * 8 + b"\xaa" * 4}),
    "Q4_K": ({0: K_ONES}, {2: NONE, 16: b"\x11" * 128}, {0: NONE}),
    "Q5_K": ({0: K_ONES}, {2: NONE, 16: bytes(32) + b"\x11" * 128}, {0: NONE}),
    "Q6_K": ({208: ONE}, {0: b"\x11" * 128 + b"\xaa" * 64 + b"\1" * 16}),
}  # fmt: skip
"""Changes of a block's bytes, by their places, that leave its integers (scales are 1, minima 0), its scales (integers
are 1, minima 0), and its minima. Scales and minima of less than 32 columns are integers, and count as part of these."""


def quantised(x: Array) -> tuple[Array, Array]:
    """Integers ``[tokens, blocks, 32]`` and scales ``[tokens, blocks]`` of floats ``[tokens, K]``."""
    x = x.reshape(len(x), -1, 32)
    size = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(size < 2.0**-120, np.float32(0), np.float32(127) / size)
    return np.rint(x * inverse[..., None]).astype(np.int64), size / np.float32(127)


def floats(rows: Array, name: str, change: dict[int, bytes]) -> Array:
    """What gguf makes of rows after a change of each block's bytes, ``[rows, blocks, 32]``."""
    changed = rows.reshape(len(rows), -1, GGUF_FORMATS[NAMES.index(name)].bytes).copy()
    for at, new in change.items():
        changed[..., at : at + len(new)] = np.frombuffer(new, np.uint8)
    return gguf.dequantize(changed.reshape(rows.shape), gguf.GGMLQuantizationType[name]).reshape(len(rows), -1, 32)


def product_in_numpy(x: Array, rows: Array, name: str, bias: Array) -> Array:
    """``x @ weights.T + bias`` ``[tokens, rows]``, block by block as the kernels add."""
    (integers, scales), (weights, shared, *minima) = quantised(x), (floats(rows, name, each) for each in CHANGES[name])
    terms = [(weights, shared)]
    if minima:
        terms += [(-floats(rows, name, {80: NONE + ONE}) if name == "Q2_K" else np.ones_like(weights), minima[0])]
    total = np.broadcast_to(bias, (len(x), len(rows))).astype(np.float32)
    for block in range(integers.shape[1]):
        for factors, shared in terms:
            sums = integers[:, block] @ factors[:, block].astype(np.int64).T
            total = fma32(sums.astype(np.float32) * scales[:, block, None], shared[:, block, 0], total)
    return total


def by_integers_in_numpy(
    x: torch.Tensor, name: str, rows: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    start = torch.zeros(len(rows)) if bias is None else bias
    return torch.from_numpy(product_in_numpy(x.numpy(), rows.numpy(), name, start.numpy()))


def right(
    quantised: bool, x: torch.Tensor, name: str, stored: tuple[torch.Tensor, torch.Tensor], bias: Any = None
) -> torch.Tensor:
    """What a product must be: by integers where a format has them, or by float32 weights of the same numbers."""
    rows, weights = stored
    if quantised and name in INTEGER_FORMATS:
        return by_integers_in_numpy(x, name, rows, bias)
    return layer(x, [weights], [] if bias is None else [bias])


def test_every_format_with_integers_is_computed_by_them():
    assert set(NAMES) - set(INTEGER_FORMATS) == {"F32", "F16", "BF16"}
    assert set(CHANGES) == set(INTEGER_FORMATS)
    rows = torch.zeros(1, 256, dtype=torch.uint8)
    assert [by_integers(Weights(rows, name, None, True)) for name in ("Q4_K", "F16", "BF16")] == [True, False, False]
    assert not by_integers(Weights(rows, "Q4_K"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "quantised"), CASES)
@pytest.mark.parametrize("shape", [(64, 256), (50, 512), (7, 256), (16, 1536), (257, 768)], ids=str)
def test_the_bits_of_what_is_written_out(name, quantised, shape):
    stored = blocks(name, *shape)
    bias, x = numbers(shape[0], seed=1), numbers(64, shape[1], seed=2)
    if quantised:
        x[5] = 0  # a block of zeros has no scale
        x[6, :40] *= 1e-38
        x[7, 3] = 1e30
    expected = right(quantised, x, name, stored, bias)
    for n in SIZES:
        for first in sorted({0, 64 - n}):
            found = run(x[first : first + n], [(name, stored[0])], [bias], quantised=quantised)
            assert torch.equal(found, expected[first : first + n]), (n, first)
    exact = x.double() @ stored[1].double().T + bias.double()
    assert float((expected - exact)[8:].norm() / exact[8:].norm()) < (0.02 if quantised else 2e-6)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", pytest.param("Q2_K", marks=pytest.mark.matrix)])
def test_the_largest_integers_of_both_overflow_nothing(name):
    rows, _ = blocks(name, 16, 256)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        rows[:] = byte
        for at in {"Q8_0": range(0, 272, 34), "Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}[name]:
            rows[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        x = torch.stack([torch.ones(256), -torch.ones(256)] * 5)
        expected = by_integers_in_numpy(x, name, rows)
        for n in (1, 2, 4, 10):
            assert torch.equal(run(x[:n], [(name, rows)], quantised=True), expected[:n]), byte


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [1, 12])
def test_what_is_not_finite_gives_outputs_that_are_not(bad, n):
    rows, _ = blocks("Q4_1", 16, 64)
    x = numbers(n, 64, seed=1)
    expected = run(x, [("Q4_1", rows)], quantised=True)
    x[0, 40] = bad
    found = run(x, [("Q4_1", rows)], quantised=True)
    assert not found[0].isfinite().any() and torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize(("name", "quantised"), [*cases(False, SMALL_BLOCKS), ("Q8_0", True)])
@pytest.mark.parametrize("columns", [32, 96, 288, 544])
def test_rows_of_any_number_of_blocks(name, quantised, columns):
    stored, x = blocks(name, 24, columns), numbers(14, columns, seed=2)
    for n in (1, 4, 14):
        found = run(x[:n], [(name, stored[0])], quantised=quantised)
        assert torch.equal(found, right(quantised, x[:n], name, stored))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("n", [1, 4, 6, 30])
def test_threads_and_shares_change_nothing(n, quantised, monkeypatch):
    stored, x = blocks("Q4_1", 130, 256), numbers(n, 256, seed=2)
    expected, given = right(quantised, x, "Q4_1", stored), [("Q4_1", stored[0])]
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for share in (1, 4, 99):
            assert torch.equal(run(x, given, share=share, quantised=quantised), expected)
    monkeypatch.setattr(executor, "openmp", lambda: None)
    for _ in range(20):
        assert torch.equal(run(x, given, share=1, quantised=quantised), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("names", "quantised"), [
    (("Q4_1", "Q4_1", "Q4_1"), False), (("Q4_0", "Q8_0", "Q4_1"), False), (("Q4_1", "Q8_0", "Q4_1"), True),
    (("F16", "Q8_0", "Q4_1"), True), (("Q4_1", "F16", "Q8_0"), True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("n", [1, 3, 5, 6, 9, 29])
def test_matrices_of_several_formats_over_the_same_tokens(n, names, quantised):
    """By integers, those formats that have none have the bits of float32 weights."""
    stored = [blocks(name, outs, 256, seed=outs) for name, outs in zip(names, (40, 16, 9), strict=True)]
    biases, x = [numbers(len(rows), seed=9) for rows, _ in stored], numbers(n, 256, seed=2)
    given = [(name, rows) for name, (rows, _) in zip(names, stored, strict=True)]
    expected = [right(quantised, x, *each) for each in zip(names, stored, biases, strict=True)]
    assert torch.equal(run(x, given, biases, quantised=quantised), torch.cat(expected, 1))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5, 6, 29])
@pytest.mark.parametrize("outs", [48, 37])
def test_sums_are_added_to_what_is_there(n, outs, quantised):
    stored, x, before = blocks("Q8_0", outs, 256), numbers(n, 256, seed=2), numbers(n, outs, seed=3)
    found = run(x, [("Q8_0", stored[0])], mode=ADD, onto=before.clone(), quantised=quantised)
    assert torch.equal(found, before + right(quantised, x, "Q8_0", stored))


@pytest.mark.parametrize(("names", "quantised"), [
    (("Q4_1", "Q4_1"), False), (("Q4_0", "Q8_0"), False), (("Q4_1", "Q4_1"), True), (("F16", "Q8_0"), True),
    (("Q8_0", "F16"), True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("outs", [48, 37])
def test_gates_are_activated_and_multiplied(outs, activation, names, quantised):
    stored = [blocks(name, outs, 256, seed=i) for i, name in enumerate(names)]
    biases, x = [numbers(outs, seed=5), numbers(outs, seed=6)], numbers(40, 256, seed=2)
    given = [(name, rows) for name, (rows, _) in zip(names, stored, strict=True)]
    how: Any = {"mode": GATE, "activation": activation}
    whole = run(x, given, biases, quantised=quantised, **how)
    if quantised:
        gate, up = (run(x, [one], [bias], quantised=True) for one, bias in zip(given, biases, strict=True))
        active = functional.silu(gate) if activation == SILU else functional.gelu(gate, approximate="tanh")
        assert torch.allclose(whole, active * up, rtol=1e-4, atol=1e-3)  # GELU cancels
    else:
        assert torch.equal(whole, layer(x, [weights for _, weights in stored], biases, **how))
    for n in (1, 2, 5, 6, 9, 12, 16, 39):
        assert torch.equal(run(x[-n:], given, biases, quantised=quantised, **how), whole[-n:])


def test_a_product_by_itself_has_the_same_bits():
    (rows, _), x = blocks("Q4_K", 40, 512), numbers(9, 512, seed=2)
    for n in (1, 9):
        assert torch.equal(product(x[:n], Weights(rows, "Q4_K", None, True)), by_integers_in_numpy(x[:n], "Q4_K", rows))
    assert not torch.equal(product(x, Weights(rows, "Q4_K")), by_integers_in_numpy(x, "Q4_K", rows))
    assert np.isfinite(product(x, Weights(rows, "Q4_K")).numpy()).all()


def looked_up(name: str, rows: torch.Tensor, ids: torch.Tensor, columns: int, factor: float = 1.0) -> torch.Tensor:
    """Rows as floats, as an embedding's kernel unpacks them."""
    x, width = torch.zeros(len(ids), columns), linear.scratch_bytes(1, columns) // 64 * 64 + 64
    slots = torch.zeros(torch.get_num_threads() * width + 64, dtype=torch.uint8)
    m = matrix_of(Weights(rows, name))
    op = LookupOp(m.w, m.row, m.block, m.unpack, columns, x.data_ptr(), x.stride(0) * 4, factor)
    executor.Program([(LOOKUP, op)]).run(
        torch.get_num_threads(), n=len(ids), ids=ids.data_ptr(), slots=slots.data_ptr(), slot_size=width
    )
    return x


@pytest.mark.parametrize(
    "name", [name if name in QUICK[0] else pytest.param(name, marks=pytest.mark.matrix) for name in NAMES]
)
def test_rows_of_an_embedding_are_those_of_gguf(name):
    rows, weights = blocks(name, 20, 512)
    ids = torch.tensor([3, 19, 0, 3])
    assert torch.equal(looked_up(name, rows, ids, 512, 1.5), weights[ids] * 1.5)
    if name != "Q6_K":  # a zero has the other sign there if its scale is negative
        assert torch.equal(looked_up(name, rows, torch.arange(20), 512).view(torch.int32), weights.view(torch.int32))


def test_scales_of_any_exponent_are_those_of_gguf():
    """Of MXFP4: from subnormal floats to where a number is too large for a float."""
    rows, _ = blocks("MXFP4", 256, 64)
    rows.view(256, 2, 17)[:, :, 0] = torch.arange(256, dtype=torch.uint8)[:, None]
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(looked_up("MXFP4", rows, torch.arange(256), 64), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "IQ4_NL"])
def test_scales_of_every_size_are_widened_rightly(name):
    """All finite float16, the smallest ones too."""
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[(every & 0x7C00) != 0x7C00]
    every = np.resize(every, -(-len(every) // 16) * 16)
    rows, _ = blocks(name, len(every), 32)
    for at in SCALES[name]:
        rows[:, at : at + 2] = torch.from_numpy(every[:, None].view(np.uint8))
    weights = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    for column in (0, 17, 31):
        x = torch.zeros(1, 32)
        x[0, column] = 1
        assert np.array_equal(run(x, [(name, rows)])[0].numpy(), weights[:, column])
