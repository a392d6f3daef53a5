"""A pass as the kernels see it: all rows' tokens side by side, and tables of addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention import float64_attention, ordered_attention
from forerun.kernels.attention.attention_tile import QUERIES
from forerun.kernels.attention.ordered_attention import PIECE, ROW, SEQUENTIAL, UNIT, RowFields, UnitFields

MANY_TILES = 64
"""From this many tiles of queries on, a row is cut into tiles only, not pieces: that is enough work for all threads,
and there are no states to keep."""
UNIT_TILES = 32
"""Tiles per unit in that case; their states fit in the nearer caches."""
UNITS = 4
"""A shorter row is cut into this many units per thread, so that threads finish at about the same time."""


@dataclass(frozen=True)
class Heads:
    """The shape of a model's attention."""

    heads: int
    kv_heads: int
    dim: int
    out_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def tile_bytes(self) -> int:
        """Bytes for the states of a tile, four queries."""
        return ordered_attention.tile_bytes(self.out_dim)


class Packed:
    """The blocks of all rows.

    Args:
        blocks: each row's input, with its place in the row's cache as its start.
        heads: the model's.
        threads: number of threads of the pass.
        positions: of the tokens for the model; by default their places.
    """

    def __init__(self, blocks: Sequence[Block], heads: Heads, threads: int, positions: IntArray | None = None) -> None:
        self.blocks, self.heads = blocks, heads
        self.counts = [len(block) for block in blocks]
        self.n = sum(self.counts)
        self.places: IntArray = np.concatenate([block.positions for block in blocks])
        self.positions = self.places if positions is None else positions
        self.parents: IntArray = np.concatenate([_parents(block) for block in blocks])
        self.owners: IntArray = np.repeat(np.arange(len(blocks)), self.counts)
        self.tiles = [math.ceil(count * heads.group / QUERIES) for count in self.counts]
        self.reach = int(self.positions.max()) + 1
        self._units(threads)

    @cached_property
    def ids(self) -> IntArray:
        """Token ids, int64 ``[n]``."""
        return np.concatenate([block.tokens for block in self.blocks])

    @cached_property
    def wanted(self) -> IntArray:
        """Indices of the tokens whose logits are wanted: each row's last pending token, and its tree's nodes."""
        ends = np.cumsum(self.counts)
        parts = [
            np.arange(end - len(block.tree) - 1, end) for end, block in zip(ends.tolist(), self.blocks, strict=True)
        ]
        return np.concatenate(parts)

    def rows(self, strides: Sequence[tuple[int, int, int, int]]) -> bytearray:
        """The table of rows, given each cache's strides in bytes: heads and rows of keys, heads and rows of values."""
        table, first = bytearray(ROW.size * len(self.blocks)), 0
        for i, (block, count) in enumerate(zip(self.blocks, self.counts, strict=True)):
            straight = count if _is_chain(block) else len(block.pending)
            fields = RowFields(first, count, straight, block.start, *strides[i], self._parts[i], self._pieces[i])
            ROW.layout.pack_into(table, i * ROW.size, *fields)
            first += count
        return table

    def _units(self, threads: int) -> None:
        """Cut the rows into units, and assign the places of their states."""
        units: list[UnitFields] = []
        self._parts, self._pieces, self.parts_size = [], [], 0
        for i, (block, tiles) in enumerate(zip(self.blocks, self.tiles, strict=True)):
            chain = _is_chain(block)
            end = block.start + (len(block) if chain else len(block.pending))
            pieces = 0 if chain and tiles > MANY_TILES else math.ceil(end / PIECE)
            if pieces:
                wanted = math.ceil(UNITS * threads / (pieces * self.heads.kv_heads * len(self.blocks)))
                share = max(1, math.ceil(tiles / wanted))
            else:
                share = min(UNIT_TILES, max(1, tiles // (UNITS * threads)))
            cuts = range(0, tiles, share)
            for piece in range(pieces) if pieces else (SEQUENTIAL,):
                units += [UnitFields(i, piece, cut, min(cut + share, tiles)) for cut in cuts]
            self._parts.append(self.parts_size)
            self._pieces.append(pieces)
            self.parts_size += max(pieces, 1) * tiles * self.heads.kv_heads * self.heads.tile_bytes
        self.unit_count = len(units)
        self.most_tiles = max(unit.last - unit.first for unit in units)
        self.units = bytearray(UNIT.size * len(units))
        for i, unit in enumerate(units):
            UNIT.layout.pack_into(self.units, i * UNIT.size, *unit)

    @property
    def slot_size(self) -> int:
        """Bytes that each thread needs for attention."""
        heads = self.heads
        scan = ordered_attention.room(self.most_tiles, heads.group, heads.dim, heads.out_dim)
        return max(scan, float64_attention.room(int(self.places.max()) + 1, heads.out_dim))


def _parents(block: Block) -> IntArray:
    return np.concatenate((np.full(len(block.pending), -1), block.tree.parents))


def _is_chain(block: Block) -> bool:
    return block.tree.is_chain


def address(table: bytearray | IntArray | torch.Tensor) -> int:
    """A table's address."""
    if isinstance(table, torch.Tensor):
        return table.data_ptr()
    return int(np.frombuffer(table, np.uint8).ctypes.data) if isinstance(table, bytearray) else int(table.ctypes.data)
