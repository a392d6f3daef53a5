"""A pass as the kernels see it: all rows' tokens side by side, and tables of addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention import float64_attention, ordered_attention, topk_attention, topk_rank
from forerun.kernels.attention.attention_tile import TILE_QUERIES
from forerun.kernels.attention.ordered_attention import (
    ALL_SPLITS,
    ROW_LAYOUT,
    SPLIT_TOKENS,
    UNIT_LAYOUT,
    RowFields,
    UnitFields,
    tile_bytes,
)
from forerun.kernels.attention.topk_rank import GROUP_CHUNKS, RANK_UNIT_BYTES, TopkFields
from forerun.kernels.runtime.vector_ir import LINE

MANY_TILES = 64
"""From this many tiles of queries on, a row is cut into tiles only, not splits: that is enough work for all threads,
and there are no states to keep."""
UNIT_TILES = 32
"""Tiles per unit in that case; their states fit in the nearer caches."""
UNITS_PER_THREAD = 4
"""A shorter row is cut into this many units per thread, so that threads finish at about the same time."""
TOPK_FIELD_COUNT = len(TopkFields._fields)
CHUNKS_FIELD, MOST_FIELD, RANK_FIELD, QUERIES_FIELD = (
    TopkFields._fields.index(name) for name in ("chunks", "most", "rank", "queries")
)


@dataclass(frozen=True)
class HeadShape:
    """The shape of a model's attention."""

    heads: int
    kv_heads: int
    dim: int
    out_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class PackedPass:
    """The blocks of all rows.

    Args:
        blocks: each row's input, with its place in the row's cache as its start.
        heads: the model's.
        threads: number of threads of the pass.
        positions: of the tokens for the model; by default their places.
    """

    def __init__(
        self, blocks: Sequence[Block], heads: HeadShape, threads: int, positions: IntArray | None = None
    ) -> None:
        self.blocks, self.heads = blocks, heads
        self.counts = [len(block) for block in blocks]
        self.n = sum(self.counts)
        self.cache_positions: IntArray = np.concatenate([block.positions for block in blocks])
        self.positions = self.cache_positions if positions is None else positions
        self.parents: IntArray = np.concatenate(
            [part for block in blocks for part in (np.full(len(block.pending), -1), block.tree.parents)]
        )
        self.token_rows: IntArray = np.repeat(np.arange(len(blocks)), self.counts)
        self.tiles = [math.ceil(count * heads.group / TILE_QUERIES) for count in self.counts]
        self.reach = int(self.positions.max()) + 1
        self.threads = threads
        self._units()

    @cached_property
    def ids(self) -> IntArray:
        """Token ids, int64 ``[n]``."""
        return np.concatenate([block.tokens for block in self.blocks])

    @cached_property
    def output_indices(self) -> IntArray:
        """See ``wanted_tokens``."""
        return wanted_tokens(self.blocks)

    def rows(self, strides: Sequence[tuple[int, int, int, int]]) -> bytearray:
        """The table of rows, given each cache's strides in bytes: heads and rows of keys, heads and rows of values."""
        rows, first = list[RowFields](), 0
        for i, (block, count) in enumerate(zip(self.blocks, self.counts, strict=True)):
            in_order = count if block.tree.is_chain else len(block.pending)
            rows.append(RowFields(first, count, in_order, block.start, *strides[i], self._states[i], self._splits[i]))
            first += count
        return ROW_LAYOUT.table(rows)

    def _units(self) -> None:
        """Cut the rows into units, and assign the places of their states."""
        units: list[UnitFields] = []
        self._states, self._splits, self.states_bytes = [], [], 0
        for i, (block, tiles) in enumerate(zip(self.blocks, self.tiles, strict=True)):
            chain = block.tree.is_chain
            end = block.start + (len(block) if chain else len(block.pending))
            splits = 0 if chain and tiles > MANY_TILES else math.ceil(end / SPLIT_TOKENS)
            if splits:
                wanted = math.ceil(UNITS_PER_THREAD * self.threads / (splits * self.heads.kv_heads * len(self.blocks)))
                share = max(1, math.ceil(tiles / wanted))
            else:
                share = min(UNIT_TILES, max(1, tiles // (UNITS_PER_THREAD * self.threads)))
            cuts = range(0, tiles, share)
            for split in range(splits) if splits else (ALL_SPLITS,):
                units += [UnitFields(i, split, cut, min(cut + share, tiles)) for cut in cuts]
            self._states.append(self.states_bytes)
            self._splits.append(splits)
            self.states_bytes += max(splits, 1) * tiles * self.heads.kv_heads * tile_bytes(self.heads.out_dim)
        self.unit_count = len(units)
        self.most_tiles = max(unit.last - unit.first for unit in units)
        self.units = UNIT_LAYOUT.table(units)

    def fields(self, rows: bytearray, work: PackedPass | TopkTables) -> dict[str, int]:
        """What operations of attention need of ``PassFields``, given the table of rows, and whose units are their work;
        without memory."""
        return {
            "rows": address(rows), "units": address(work.units), "unit_count": work.unit_count,
            "token_rows": address(self.token_rows), "cache_positions": address(self.cache_positions),
            "parents": address(self.parents),
        }  # fmt: skip

    @property
    def slot_size(self) -> int:
        """Bytes that each thread needs for attention."""
        heads = self.heads
        scan = ordered_attention.scratch_bytes(self.most_tiles, heads.group, heads.dim, heads.out_dim)
        return max(scan, float64_attention.scratch_bytes(int(self.cache_positions.max()) + 1, heads.out_dim))


class TopkTables:
    """What all rows' queries choose among; it stands in for the units of ``PackedPass``.

    Args:
        packed: the blocks.
        tables: for each row, one row of ``TopkFields`` per layer, with 0 in the fields that depend on the pass.

    Attributes:
        units, unit_count: the table of units that rank chunks.
        slot_size: bytes that each thread needs.
        states_bytes: bytes for all rows' rounded queries, and for the worth of chunks to them.
        worth_offset, worth_chunks: where the last row's worth begins, and chunks that it has room for.
    """

    def __init__(self, packed: PackedPass, tables: Sequence[IntArray]) -> None:
        self._tables, self._sizes = tables, list[_TopkSizes]()  # by row
        heads, ranked, self.slot_size, self.states_bytes = packed.heads, [], 0, 0
        for table, block, count in zip(tables, packed.blocks, packed.counts, strict=True):
            chunks, most, rank = (int(table[0, field]) for field in (CHUNKS_FIELD, MOST_FIELD, RANK_FIELD))
            ranked.append(chunks if most < chunks else 0)
            padded, worth = topk_rank.padded_queries(count, heads.group), 4 * _whole(ranked[-1], GROUP_CHUNKS)
            every, self.worth_chunks = heads.kv_heads * padded, worth // 4
            self._sizes.append(_TopkSizes(padded, _whole(every * rank, LINE), _whole(4 * every, LINE), worth))
            self.worth_offset = self.states_bytes + self._sizes[-1].rounded_bytes + self._sizes[-1].unit_bytes
            self.states_bytes = self.worth_offset + every * worth
            self.slot_size = max(
                self.slot_size, topk_attention.scratch_bytes(chunks, most, block.start + count, heads.dim)
            )
        self.units = topk_rank.rank_units(ranked)
        self.unit_count = len(self.units) // RANK_UNIT_BYTES
        self._kv_heads = heads.kv_heads

    def fill(self, table: IntArray, memory: int) -> None:
        """Write all layers' and rows' fields, ``[layers, rows, ...]``; ``states_bytes`` of the memory at an address are
        theirs."""
        for row, (own, sizes) in enumerate(zip(self._tables, self._sizes, strict=True)):
            units = memory + sizes.rounded_bytes
            worth, head = units + sizes.unit_bytes, sizes.queries * sizes.worth_bytes
            table[:, row, :QUERIES_FIELD] = own[:, :QUERIES_FIELD]
            table[:, row, QUERIES_FIELD:TOPK_FIELD_COUNT] = sizes.queries, memory, units, worth, head, sizes.worth_bytes
            memory = worth + self._kv_heads * head


class _TopkSizes(NamedTuple):
    """What one row's queries take.

    Attributes:
        queries: of a KV head, padded.
        rounded_bytes, unit_bytes: of all rounded queries, and of their units.
        worth_bytes: of the worth of all chunks to one query.
    """

    queries: int
    rounded_bytes: int
    unit_bytes: int
    worth_bytes: int


def wanted_tokens(blocks: Sequence[Block]) -> IntArray:
    """Indices of the tokens whose logits are wanted: each row's last pending token, and its tree's nodes."""
    ends = np.cumsum([len(block) for block in blocks]).tolist()
    return np.concatenate([np.arange(end - len(block.tree) - 1, end) for end, block in zip(ends, blocks, strict=True)])


def address(table: bytearray | IntArray) -> int:
    """A table's address."""
    return int(np.frombuffer(table, np.uint8).ctypes.data) if isinstance(table, bytearray) else int(table.ctypes.data)


def _whole(size: int, unit: int) -> int:
    """A size, rounded up to whole units."""
    return unit * math.ceil(size / unit)
