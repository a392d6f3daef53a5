"""Packed weights by integers: the bits of the products written out in numpy, in any pass, on any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from support import integer_products
from support.gguf_blocks import NAMES, blocks
from support.linear_ops import layer
from support.linear_ops import run as run_table
from torch.nn import functional

from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS
from forerun.kernels.linear.linear import ADD, GATE, PUT, Weights, by_integers, product, table_of
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.runtime import vector_ir

pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

QUICK = ("Q4_1", "Q8_0", "Q4_K", "Q6_K")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in INTEGER_FORMATS]
"""Each format compiles a kernel of its own."""
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 33, 64)


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(
    x: torch.Tensor, weights: Sequence[tuple[str, torch.Tensor]], biases: Sequence[torch.Tensor] = (), *,
    mode: int = PUT, onto: torch.Tensor | None = None, share: int = 2, activation: int = SILU,
) -> torch.Tensor:  # fmt: skip
    """One operation over one to three matrices."""
    outs = [len(rows) for _, rows in weights]
    y = onto if onto is not None else torch.zeros(len(x), outs[0] if mode == GATE else sum(outs))
    table = table_of([Weights(rows, name, bias, True) for (name, rows), bias in zip_longest(weights, biases)])
    return run_table(table, 0, x.shape[1], x, y, mode, share, activation)


def written_out(x: torch.Tensor, name: str, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    start = torch.zeros(len(rows)) if bias is None else bias
    return torch.from_numpy(integer_products.product(x.numpy(), rows.numpy(), name, start.numpy()))


def test_every_format_with_integers_is_computed_by_them() -> None:
    assert set(NAMES) - set(INTEGER_FORMATS) == {"F32", "F16", "BF16"}
    assert set(integer_products.PARTS) == set(INTEGER_FORMATS)
    rows = torch.zeros(1, 256, dtype=torch.uint8)
    assert [by_integers(Weights(rows, name, None, True)) for name in ("Q4_K", "F16", "BF16")] == [True, False, False]
    assert not by_integers(Weights(rows, "Q4_K"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(64, 256), (50, 512), (7, 256), (129, 768)], ids=str)
def test_the_bits_of_the_products_written_out(name: str, shape: tuple[int, int]) -> None:
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
def test_the_largest_integers_of_both_overflow_nothing(name: str) -> None:
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
def test_what_is_not_finite_gives_outputs_that_are_not(bad: float, n: int) -> None:
    rows, _ = blocks("Q4_1", 16, 64)
    x = numbers(n, 64, seed=1)
    expected = run(x, [("Q4_1", rows)])
    x[0, 40] = bad
    found = run(x, [("Q4_1", rows)])
    assert not found[0].isfinite().any() and torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize("columns", [32, 96, 288, 544])
def test_rows_of_any_number_of_blocks(columns: int) -> None:
    (rows, _), x = blocks("Q8_0", 24, columns), numbers(14, columns, seed=2)
    for n in (1, 4, 14):
        assert torch.equal(run(x[:n], [("Q8_0", rows)]), written_out(x[:n], "Q8_0", rows))


@pytest.mark.parametrize("n", [1, 4, 30])
def test_threads_and_shares_change_nothing(n: int) -> None:
    (rows, _), x = blocks("Q4_1", 130, 256), numbers(n, 256, seed=2)
    expected = written_out(x, "Q4_1", rows)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for share in (1, 4, 99):
            assert torch.equal(run(x, [("Q4_1", rows)], share=share), expected)


MIXED = [("Q4_1", "Q8_0", "Q4_1"), ("F16", "Q8_0", "Q4_1"), ("Q4_1", "F16", "Q8_0")]


@pytest.mark.parametrize("n", [1, 3, 6, 9, 29])
@pytest.mark.parametrize("names", MIXED, ids="-".join)
def test_matrices_of_several_formats_over_the_same_tokens(n: int, names: tuple[str, ...]) -> None:
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
def test_sums_are_added_to_what_is_there(n: int, outs: int) -> None:
    (rows, _), x, before = blocks("Q8_0", outs, 256), numbers(n, 256, seed=2), numbers(n, outs, seed=3)
    expected = before + written_out(x, "Q8_0", rows)
    assert torch.equal(run(x, [("Q8_0", rows)], mode=ADD, onto=before.clone()), expected)


@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("F16", "Q8_0"), ("Q8_0", "F16")], ids="-".join)
@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("outs", [48, 37])
def test_gates_are_activated_and_multiplied(outs: int, activation: int, names: tuple[str, ...]) -> None:
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


def test_a_product_by_itself_has_the_same_bits() -> None:
    (rows, _), x = blocks("Q4_K", 40, 512), numbers(9, 512, seed=2)
    for n in (1, 9):
        assert torch.equal(product(x[:n], Weights(rows, "Q4_K", None, True)), written_out(x[:n], "Q4_K", rows))
    assert not torch.equal(product(x, Weights(rows, "Q4_K")), written_out(x, "Q4_K", rows))
    assert np.isfinite(product(x, Weights(rows, "Q4_K")).numpy()).all()
