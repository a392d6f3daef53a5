"""Describe weight matrices, in any format, for the kernels of linear layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import compiled
from forerun.kernels.linear.panels import few, format_number, format_of, many_in_rows, many_in_tiles, unpack
from forerun.kernels.linear.weight_format import PLAIN_FORMATS
from forerun.kernels.runtime.addresses import StructLayout, address_of
from forerun.kernels.runtime.vector_ir import wide

NUMBER_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
PLAIN_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in NUMBER_KINDS}


class Weights(NamedTuple):
    """A matrix and its bias."""

    rows: torch.Tensor  # contiguous ``[O, K]`` of a type of ``NUMBER_KINDS``, or packed bytes ``[O, row]``
    format: str  # its name in ``PLAIN_FORMATS`` or ``GGUF_FORMATS``
    bias: torch.Tensor | None = None  # ``[O]`` in the type of the inputs
    quantised: bool = False  # whether inputs are quantised to eight bits; ignored for formats without integers


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Weights:
    """Wrap a matrix of a type of ``NUMBER_KINDS``."""
    return Weights(weight, PLAIN_NAMES[weight.dtype], bias)


class Matrix(NamedTuple):
    """A matrix as kernels see it: addresses and counts; ``block`` is its words per block. Machine code is that of its
    format, or 0: ``few``, ``many_in_rows`` and, with AVX-512, ``many_in_tiles`` for plain weights; ``few`` and
    ``unpack``, or ``few_by_integers``, ``codes`` and ``many_by_integers``, for packed ones."""

    w: int
    row: int
    outs: int
    panels: int
    bias: int
    block: int
    few: int
    unpack: int
    many_in_rows: int
    many_in_tiles: int
    few_by_integers: int
    codes: int
    many_by_integers: int


MATRIX = StructLayout(Matrix)
MATRIX_BYTES = 8 * len(Matrix._fields)
read_matrix = MATRIX.reader()

MatrixTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def matrix_of(weights: Weights) -> Matrix:
    """Describe a matrix for kernels."""
    rows, which = weights.rows, format_number(weights.format)
    bias = 0 if weights.bias is None else weights.bias.data_ptr()
    if by_integers(weights):
        from forerun.kernels.linear.integer_panels import integer_code  # not needed for plain weights

        code = (0, 0, 0, 0, *integer_code(which))
    else:
        code = (*_format_code(which), 0, 0, 0)
    row = rows.stride(0) * rows.element_size()
    each = format_of(which)
    panels = math.ceil(len(rows) / each.numbers.lanes)
    return Matrix(rows.data_ptr(), row, len(rows), panels, bias, each.words, *code)


def by_integers(weights: Weights) -> bool:
    """Return whether products with these weights are sums of integers."""
    if not weights.quantised or weights.format in PLAIN_NAMES.values():
        return False
    from forerun.kernels.linear.gguf_integers import INTEGER_FORMATS  # not needed for plain weights

    return weights.format in INTEGER_FORMATS


def table_of(matrices: Sequence[Weights]) -> MatrixTable:
    """Describe one operation's matrices for kernels; the table must outlive the operation."""
    return np.array([matrix_of(each) for each in matrices], np.int64).reshape(-1, len(Matrix._fields))


@functools.cache
def _format_code(which: int) -> tuple[int, int, int, int]:
    @compiled
    def products_of_few(
        tokens: int, w: int, other: int, row: int, last: int, other_last: int, x: int, x_row: int, blocks: int,
        ahead: int, sums: int,
    ) -> None:  # fmt: skip
        few(which, tokens, w, other, row, last, other_last, x, x_row, blocks, ahead, sums)

    @compiled
    def products_in_rows(
        tokens: int, w: int, row: int, last: int, x: int, steps: int, ahead: int, tiles: int, sums: int
    ) -> None:
        many_in_rows(which, tokens, w, row, last, x, steps, ahead, tiles, sums)

    @compiled
    def products_in_tiles(tiles: int, x: int, steps: int, sums: int) -> None:
        many_in_tiles(which, tiles, x, steps, sums)

    of_few = address_of(products_of_few, 11)
    if which < len(PLAIN_FORMATS):
        return of_few, 0, address_of(products_in_rows, 9), address_of(products_in_tiles, 4) if wide() else 0
    return of_few, unpack_code(which), 0, 0


@functools.cache
def unpack_code(which: int) -> int:
    """Return ``unpack`` for a packed format's number."""

    @compiled
    def columns_of(w: int, row: int, last: int, blocks: int, ahead: int, to: int) -> None:
        unpack(which, w, row, last, blocks, ahead, to)

    return address_of(columns_of, 6)
