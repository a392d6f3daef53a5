"""Linear layers in one order of sums: right, and a token's outputs the same bits whatever shares the pass."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.linear_ops import fma32, layer, numbers
from torch.nn.functional import gelu, silu

from forerun.core.compiling import compiled
from forerun.kernels.linear.linear import CHUNK_COLUMNS, PAIRS_AT_ONCE
from forerun.kernels.linear.linear_op import ADD, GATE, PUT
from forerun.kernels.linear.panels import transpose
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.linear.weight_format import multiplies_pairs
from forerun.kernels.linear.weight_matrix import NUMBER_KINDS
from forerun.kernels.runtime import executor, vector_ir

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

EPS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}
SHAPES = [(64, 64), (50, 40), (33, 1536), (7, 12), (192, 2050), (16, 2), (1, 70), (257, 4160)]
"""Outputs and columns: whole and broken panels, whole and broken vectors, more and fewer than a chunk."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 32, 33, 40, 48, 63, 64, 65, 70)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64, rounded once: by fractions."""
    exact: Any = np.vectorize(lambda a, b, c: float(Fraction(a) * Fraction(b) + Fraction(c)), otypes=[np.float64])
    return exact(a, b, c)


def in_order(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The promise, written out: from the bias on, column by column, one rounding each."""
    wide = x.dtype == torch.float64
    fma, (tokens, weights, start) = fma64 if wide else fma32, [(t if wide else t.float()).numpy() for t in (x, w, bias)]
    sums = np.broadcast_to(start, (len(tokens), len(weights)))
    for column in range(tokens.shape[1]):
        sums = fma(tokens[:, column, None], weights[None, :, column], sums)
    return torch.from_numpy(np.ascontiguousarray(sums))


@pytest.mark.parametrize("dtype", NUMBER_KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_the_sums_in_double_precision(shape, dtype):
    (outs, columns), w = shape, numbers(*shape, dtype=dtype)
    bias = numbers(outs, dtype=dtype, seed=1)
    for n in (1, 3, 16, 35):
        x = numbers(n, columns, dtype=dtype, seed=2)
        exact = x.double() @ w.double().T
        assert error(layer(x, [w]), exact) < EPS[dtype]
        assert error(layer(x, [w], [bias]), exact + bias.double()) < EPS[dtype]


@pytest.mark.parametrize("dtype", NUMBER_KINDS, ids=str)
@pytest.mark.parametrize("shape", [(50, 40), (33, 1536), (7, 12), (40, 4160)], ids=str)
def test_the_same_bits_for_any_number_of_tokens_at_any_place(shape, dtype):
    (outs, columns), w = shape, numbers(*shape, dtype=dtype)
    bias, x = numbers(outs, dtype=dtype, seed=1), numbers(70, columns, dtype=dtype, seed=2)
    whole = layer(x, [w], [bias])
    for n in range(1, 71) if columns < 100 else SIZES:
        for first in sorted({0, (70 - n) // 2, 70 - n}):
            assert torch.equal(layer(x[first : first + n], [w], [bias]), whole[first : first + n]), (n, first)


@pytest.mark.parametrize("dtype", NUMBER_KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 7, 40])
def test_threads_and_shares_change_nothing(n, dtype, monkeypatch):
    w, x = numbers(130, 200, dtype=dtype), numbers(n, 200, dtype=dtype, seed=2)
    torch.set_num_threads(1)
    alone = layer(x, [w], share=99)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        for share in (1, 4):
            assert torch.equal(layer(x, [w], share=share), alone)
    monkeypatch.setattr(executor, "openmp", lambda: None)
    for _ in range(20):
        assert torch.equal(layer(x, [w], share=1), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(
    multiplies_pairs(), reason="the processor adds products of pairs in its own way"))], ids=str)  # fmt: skip
@pytest.mark.parametrize("n", [1, 5, 21])
def test_sums_go_from_the_bias_on_column_by_column(n, dtype):
    w, bias, x = (numbers(*s, dtype=dtype, seed=i) for i, s in enumerate([(18, 70), (18,), (n, 70)]))
    to = torch.float32 if dtype == torch.bfloat16 else dtype
    assert torch.equal(layer(x, [w], [bias], to=to), in_order(x, w, bias))


def test_bfloat16_sums_are_rounded_once_to_the_nearest():
    w, bias, x = (numbers(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(50, 600), (50,), (9, 600)]))
    wide = layer(x, [w], [bias], to=torch.float32)
    assert error(wide, x.double() @ w.double().T + bias.double()) < EPS[torch.float32]
    assert torch.equal(layer(x, [w], [bias]), wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 6, 40])
def test_three_matrices_over_the_same_tokens(n, dtype):
    weights = [numbers(outs, 96, dtype=dtype, seed=outs) for outs in (40, 16, 9)]
    biases = [numbers(len(w), dtype=dtype, seed=9) for w in weights]
    x = numbers(n, 96, dtype=dtype, seed=2)
    apart = [layer(x, [w], [b], to=torch.float32) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(layer(x, weights, biases, to=torch.float32), torch.cat(apart, 1))


@pytest.mark.parametrize("dtype", NUMBER_KINDS, ids=str)
@pytest.mark.parametrize("mode", [PUT, GATE])
def test_chunks_of_columns_over_many_panels_change_nothing(mode, dtype):
    columns = 2 * CHUNK_COLUMNS * (2 if dtype == torch.bfloat16 else 1) + 40
    outs = 2 * 16 * PAIRS_AT_ONCE + 70
    weights = [numbers(outs, columns, dtype=dtype, seed=i) for i in range(2)]
    biases, x = [numbers(outs, dtype=dtype, seed=5)] * 2, numbers(21, columns, dtype=dtype, seed=2)
    together = layer(x, weights, biases, mode=mode, share=99)
    for t in range(len(x)):
        assert torch.equal(layer(x[t : t + 1], weights, biases, mode=mode), together[t : t + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outs", [48, 37])
@pytest.mark.parametrize("n", [1, 6, 40])
def test_sums_are_added_to_what_is_there(n, outs, dtype):
    w, x = numbers(outs, 96, dtype=dtype), numbers(n, 96, dtype=dtype, seed=2)
    before = numbers(n, outs, dtype=torch.float32, seed=3)
    after = layer(x, [w], mode=ADD, onto=before.clone())
    assert torch.equal(after, before + layer(x, [w], to=torch.float32))


@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outs", [48, 37])
def test_gates_are_activated_and_multiplied(outs, dtype, activation):
    pair = [numbers(outs, 96, dtype=dtype, seed=i) for i in range(2)]
    biases, x = [numbers(outs, dtype=dtype, seed=5)] * 2, numbers(40, 96, dtype=dtype, seed=2)
    gate, up = (x.double() @ w.double().T + b.double() for w, b in zip(pair, biases, strict=True))
    exact = (silu(gate) if activation == SILU else gelu(gate, approximate="tanh")) * up
    whole = layer(x, pair, biases, mode=GATE, activation=activation)
    assert error(whole, exact) < EPS[dtype]
    for n in (1, 2, 5, 16, 39):
        assert torch.equal(layer(x[-n:], pair, biases, mode=GATE, activation=activation), whole[-n:])


@pytest.mark.parametrize("dtype", NUMBER_KINDS, ids=str)
def test_what_is_not_a_number_stays_with_its_token_and_its_output(dtype):
    w, x = numbers(20, 40, dtype=dtype), numbers(5, 40, dtype=dtype, seed=2)
    plain = layer(x, [w])
    x[2, 7] = torch.nan
    w[19, 3] = torch.inf
    found = layer(x, [w])
    assert found[2].isnan().all() and not found[:2, :19].isnan().any() and not found[:2, 19].isfinite().any()
    keep = [0, 1, 3, 4]
    assert torch.equal(found[keep, :19], plain[keep, :19])


def test_a_function_has_the_code_of_its_own_kind_though_another_kind_was_compiled_after_the_first():
    def columns(kind: int) -> np.ndarray:
        @compiled
        def columns_of(w: int, row: int, last: int, steps: int, to: int) -> None:
            transpose(kind, w, row, last, steps, to)

        found = np.zeros((32, 16), np.float32)
        columns_of(panel.ctypes.data, panel.strides[0], 15, 1, found.ctypes.data)
        return found

    panel = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    before, other, after = (columns(kind) for kind in (0, 2, 0))
    assert np.array_equal(before[:16], panel.T)
    assert not np.array_equal(other, before)
    assert np.array_equal(after, before)


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor keeps denormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_a_thread_that_flushes_denormal_numbers_changes_no_sum(flushing):
    x, weight = torch.full((3, 64), 1e-20), torch.full((40, 64), 1e-20)
    found = layer(x, [weight])
    assert float(torch.tensor([1e-20]) * torch.tensor([1e-20])) == 0  # this thread flushes, before and after
    torch.set_flush_denormal(False)
    assert torch.equal(found, layer(x, [weight])) and bool((found > 0).all())
