"""Weights as GGUF stores them: the very bits that float32 weights of the same numbers give, in any pass."""

from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_blocks import NAMES, SCALES, blocks
from support.linear_ops import layer, numbers
from support.linear_ops import run_stored as run

from forerun.kernels.linear import linear
from forerun.kernels.linear.decoder_ops import LOOKUP, LookupOp
from forerun.kernels.linear.gguf_formats import GGUF_FORMATS
from forerun.kernels.linear.linear import ADD, GATE, Weights, matrix_of
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.runtime import executor, vector_ir

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

QUICK = ("Q4_1", "Q8_0", "Q4_K")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in NAMES]
"""Each format compiles a kernel of its own."""
SMALL_BLOCKS = [case for case, each in zip(CASES, GGUF_FORMATS, strict=True) if each.words <= 32]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 24, 25, 31, 40)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(64, 256), (50, 512), (7, 256), (16, 1536), (257, 768)], ids=str)
def test_the_bits_of_float32_weights_of_the_same_numbers(name, shape):
    rows, weights = blocks(name, *shape)
    bias, x = numbers(shape[0], seed=1), numbers(40, shape[1], seed=2)
    expected = layer(x, [weights], [bias])
    for n in SIZES:
        for first in sorted({0, 40 - n}):
            found = run(x[first : first + n], [(name, rows)], [bias])
            assert torch.equal(found, expected[first : first + n]), (n, first)
    exact = x.double() @ weights.double().T + bias.double()
    assert float((expected - exact).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("name", SMALL_BLOCKS)
@pytest.mark.parametrize("columns", [32, 96, 288, 544])
def test_rows_of_any_number_of_blocks(name, columns):
    (rows, weights), x = blocks(name, 24, columns), numbers(14, columns, seed=2)
    for n in (1, 4, 14):
        assert torch.equal(run(x[:n], [(name, rows)]), layer(x[:n], [weights]))


@pytest.mark.parametrize("n", [1, 4, 6, 30])
def test_threads_and_shares_change_nothing(n, monkeypatch):
    (rows, weights), x = blocks("Q4_1", 130, 256), numbers(n, 256, seed=2)
    expected = layer(x, [weights])
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for share in (1, 4, 99):
            assert torch.equal(run(x, [("Q4_1", rows)], share=share), expected)
    monkeypatch.setattr(executor, "openmp", lambda: None)
    for _ in range(20):
        assert torch.equal(run(x, [("Q4_1", rows)], share=1), expected)


@pytest.mark.parametrize("n", [1, 3, 5, 6, 29])
@pytest.mark.parametrize("names", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_0", "Q8_0", "Q4_1")], ids="-".join)
def test_matrices_of_several_formats_over_the_same_tokens(n, names):
    pairs = [blocks(name, outs, 256, seed=outs) for name, outs in zip(names, (40, 16, 9), strict=True)]
    biases, x = [numbers(len(rows), seed=9) for rows, _ in pairs], numbers(n, 256, seed=2)
    found = run(x, [(name, rows) for name, (rows, _) in zip(names, pairs, strict=True)], biases)
    assert torch.equal(found, layer(x, [weights for _, weights in pairs], biases))


@pytest.mark.parametrize("n", [1, 3, 5, 6, 29])
@pytest.mark.parametrize("outs", [48, 37])
def test_sums_are_added_to_what_is_there(n, outs):
    (rows, weights), x, before = blocks("Q8_0", outs, 256), numbers(n, 256, seed=2), numbers(n, outs, seed=3)
    expected = layer(x, [weights], mode=ADD, onto=before.clone())
    assert torch.equal(run(x, [("Q8_0", rows)], mode=ADD, onto=before.clone()), expected)


@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("Q4_0", "Q8_0")], ids="-".join)
@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("outs", [48, 37])
def test_gates_are_activated_and_multiplied(outs, activation, names):
    pairs = [blocks(name, outs, 256, seed=i) for i, name in enumerate(names)]
    biases, x = [numbers(outs, seed=5), numbers(outs, seed=6)], numbers(40, 256, seed=2)
    how: Any = {"mode": GATE, "activation": activation}
    expected = layer(x, [weights for _, weights in pairs], biases, **how)
    given = [(name, rows) for name, (rows, _) in zip(names, pairs, strict=True)]
    for n in (1, 2, 5, 6, 12, 16, 39):
        assert torch.equal(run(x[-n:], given, biases, **how), expected[-n:])


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


@pytest.mark.parametrize("name", CASES)
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
