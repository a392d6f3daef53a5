"""A pass as the kernels see it: all rows' tokens side by side, and tables of addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

import numpy as np

from forerun.core.block import Block
from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.kernels.attention import float64_attention, ordered_attention, topk_attention, topk_rank
from forerun.kernels.attention.attention_tile import TILE_QUERIES
from forerun.kernels.attention.ordered_attention import (
    ALL_SPLITS,
    ROW_BYTES,
    SPLIT_TOKENS,
    UNIT_BYTES,
    RowFields,
    tile_bytes,
)
from forerun.kernels.attention.topk_rank import GROUP_CHUNKS, RANK_UNIT_BYTES, TopkFields
from forerun.kernels.runtime.vector_ir import LINE

MANY_TILES = 64
"""Tiles of queries from which on a row is not cut into splits: enough work for all threads, and no states to keep."""
UNIT_TILES = 32
"""Tiles per unit in that case; their states fit in the nearer caches."""
UNITS_PER_THREAD = 4
"""Units per thread of a shorter row, so that threads finish at about the same time."""
CUT_INTEGERS = 8
"""Integers per row in the table of ``_cut`` and ``_fill``."""
NO_PARENTS = np.zeros(0, np.int64)
TABLES = ("rows", "units", "token_rows", "cache_positions", "parents", "ids", "positions", "output_indices")
"""A pass's tables in the order of their memory, as ``PassFields`` names them."""
ROW_INTEGERS, UNIT_INTEGERS = ROW_BYTES // 8, UNIT_BYTES // 8
STRIDES = slice(RowFields._fields.index("k_head"), RowFields._fields.index("v_row") + 1)
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
        positions: the tokens', for the model; by default their places in their row's memory.
        places: each block's first place in its row's memory; by default the blocks' starts.

    Attributes:
        n, counts: number of tokens, of all rows and of each.
        units: the table of units.
        ids, positions, cache_positions: each token's id, and its position for the model and in its row's memory, int64
            ``[n]``.
        output_indices: see ``wanted_tokens``.
        bounds: the least and the greatest token id, and the greatest position for the model.
        unit_count, most_tiles, states_bytes: number of units, most tiles in one, and bytes of all states.
    """

    def __init__(
        self, blocks: Sequence[Block], heads: HeadShape, threads: int, positions: IntArray | None = None,
        places: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.blocks, self.heads, self.threads = blocks, heads, threads
        self.places = [block.start for block in blocks] if places is None else places
        self.counts = [len(block) for block in blocks]
        self.n, rows = sum(self.counts), len(blocks)
        parents = _joined([block.tree.parents for block in blocks if len(block.tree)])
        tokens = _joined([part for block in blocks for part in (block.pending, block.tree.tokens) if len(part)])
        cuts = np.empty((rows, CUT_INTEGERS), np.int64)
        for row, (block, place) in enumerate(zip(blocks, self.places, strict=True)):
            cuts[row, :3] = len(block.pending), len(block.tree), place
        self.unit_count, self.most_tiles, self.states_bytes = _cut(
            cuts, parents, heads.group, heads.kv_heads, threads, tile_bytes(heads.out_dim)
        )
        sizes = (rows * ROW_INTEGERS, self.unit_count * UNIT_INTEGERS, *[self.n] * 5, rows + len(parents))
        self._memory = np.zeros(sum(sizes), np.int64)
        ends = [0, *accumulate(sizes)]
        (
            self._rows,
            self.units,
            self._token_rows,
            self.cache_positions,
            self._parents,
            self.ids,
            self.positions,
            wanted,
        ) = (self._memory[first:last] for first, last in pairwise(ends))
        self.output_indices = wanted
        _fill(
            cuts, parents, self._rows.reshape(rows, -1), self.units.reshape(self.unit_count, -1), self._token_rows,
            self.cache_positions, self._parents, wanted,
        )  # fmt: skip
        self.bounds = _number(
            tokens, self.cache_positions if positions is None else positions, self.ids, self.positions
        )
        address = self._memory.ctypes.data
        self._addresses = dict(zip(TABLES, (address + 8 * end for end in ends), strict=False))

    def rows(self, strides: Sequence[tuple[int, int, int, int]]) -> IntArray:
        """Return the table of rows, given each cache's byte strides: heads and rows of keys, heads and rows of
        values."""
        table = self._rows.reshape(len(self.blocks), -1).copy()
        table[:, STRIDES] = strides
        return table

    def fields(self, rows: IntArray, work: PackedPass | TopkTables) -> dict[str, int]:
        """Return the ``PassFields`` of the tokens and of attention, without memory, given the table of rows and the
        work's units."""
        fields = self._addresses | {"n": self.n, "rows": address(rows), "unit_count": work.unit_count}
        return fields if work is self else fields | {"units": address(work.units)}

    @property
    def slot_size(self) -> int:
        """Scratch bytes per thread."""
        heads, furthest = self.heads, max(map(add, self.places, self.counts))
        scan = ordered_attention.scratch_bytes(self.most_tiles, heads.group, heads.dim, heads.out_dim)
        return max(scan, float64_attention.scratch_bytes(furthest, heads.out_dim))


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else NO_PARENTS


@compiled
def _number(tokens: IntArray, places: IntArray, ids: IntArray, positions: IntArray) -> tuple[int, int, int]:
    """Copy each token's id and position; return ``PackedPass.bounds``."""
    least = most = tokens[0]
    last = places[0]
    for i in range(len(tokens)):
        ids[i], positions[i] = tokens[i], places[i]
        least, most, last = min(least, tokens[i]), max(most, tokens[i]), max(last, places[i])
    return least, most, last


@compiled
def _cut(cuts: IntArray, parents: IntArray, group: int, kv_heads: int, threads: int, tile: int) -> tuple[int, int, int]:
    """Cut rows into units, and place their states; return the number of units, most tiles in one, and bytes of all
    states. ``cuts`` has each row's pending tokens, nodes and place. Its tiles, its splits, tiles per unit, the offset
    of its states and its tokens in sequence order are written. ``tile`` is the bytes of a tile's state."""
    units, most, states, node = 0, 0, 0, 0
    for row in range(len(cuts)):
        pending, nodes, place = cuts[row, 0], cuts[row, 1], cuts[row, 2]
        chain = True
        for i in range(nodes):
            chain &= parents[node + i] == i - 1
        node += nodes
        in_order = pending + nodes if chain else pending
        tiles = -(-(pending + nodes) * group // TILE_QUERIES)
        splits = 0 if chain and tiles > MANY_TILES else -(-(place + in_order) // SPLIT_TOKENS)
        if splits:
            wanted = -(-UNITS_PER_THREAD * threads // (splits * kv_heads * len(cuts)))
            share = max(1, -(-tiles // wanted))
        else:
            share = min(UNIT_TILES, max(1, tiles // (UNITS_PER_THREAD * threads)))
        cuts[row, 3], cuts[row, 4], cuts[row, 5], cuts[row, 6], cuts[row, 7] = tiles, splits, share, states, in_order
        units += max(splits, 1) * -(-tiles // share)
        most = max(most, min(share, tiles))
        states += max(splits, 1) * tiles * kv_heads * tile
    return units, most, states


@compiled
def _fill(
    cuts: IntArray, parents: IntArray, rows: IntArray, units: IntArray, token_rows: IntArray, positions: IntArray,
    token_parents: IntArray, wanted: IntArray,
) -> None:  # fmt: skip
    token, node, unit, output = 0, 0, 0, 0
    for row in range(len(cuts)):
        pending, nodes, place = cuts[row, 0], cuts[row, 1], cuts[row, 2]
        tiles, splits, share = cuts[row, 3], cuts[row, 4], cuts[row, 5]
        rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = token, pending + nodes, cuts[row, 7], place
        rows[row, 8], rows[row, 9] = cuts[row, 6], splits
        root = token + pending - 1
        for i in range(pending):
            token_rows[token + i], positions[token + i], token_parents[token + i] = row, place + i, -1
        for i in range(nodes):
            parent = parents[node + i]
            above = root if parent < 0 else root + 1 + parent
            token_rows[root + 1 + i], token_parents[root + 1 + i] = row, parent
            positions[root + 1 + i] = positions[above] + 1
        for i in range(nodes + 1):
            wanted[output + i] = root + i
        for split in range(max(splits, 1)):
            for first in range(0, tiles, share):
                units[unit, 0], units[unit, 1] = row, split if splits else ALL_SPLITS
                units[unit, 2], units[unit, 3] = first, min(first + share, tiles)
                unit += 1
        token, node, output = token + pending + nodes, node + nodes, output + nodes + 1


class TopkTables:
    """What all rows' queries choose among; replaces the units of ``PackedPass``.

    ``tables`` has for each row one row of ``TopkFields`` per layer, with 0 in the fields that depend on the pass.

    Attributes:
        units, unit_count: the table of units that rank chunks.
        slot_size, states_bytes: scratch bytes per thread; bytes of all rows' rounded queries and chunks' worth.
        worth_offset, worth_chunks: where the last row's worth starts, and its capacity in chunks.
    """

    def __init__(self, packed: PackedPass, tables: Sequence[IntArray]) -> None:
        self._tables, self._sizes = tables, list[_TopkSizes]()  # by row
        heads, ranked, self.slot_size, self.states_bytes = packed.heads, [], 0, 0
        for table, place, count in zip(tables, packed.places, packed.counts, strict=True):
            chunks, most, rank = (int(table[0, field]) for field in (CHUNKS_FIELD, MOST_FIELD, RANK_FIELD))
            ranked.append(chunks if most < chunks else 0)
            padded, worth = topk_rank.padded_queries(count, heads.group), 4 * _whole(ranked[-1], GROUP_CHUNKS)
            every, self.worth_chunks = heads.kv_heads * padded, worth // 4
            self._sizes.append(_TopkSizes(padded, _whole(every * rank, LINE), _whole(4 * every, LINE), worth))
            self.worth_offset = self.states_bytes + self._sizes[-1].rounded_bytes + self._sizes[-1].unit_bytes
            self.states_bytes = self.worth_offset + every * worth
            self.slot_size = max(self.slot_size, topk_attention.scratch_bytes(chunks, most, place + count, heads.dim))
        self.units = topk_rank.rank_units(ranked)
        self.unit_count = len(self.units) // RANK_UNIT_BYTES
        self._kv_heads = heads.kv_heads

    def fill(self, table: IntArray, memory: int) -> None:
        """Write all layers' and rows' fields ``[layers, rows, ...]``, given the address of ``states_bytes`` bytes."""
        for row, (own, sizes) in enumerate(zip(self._tables, self._sizes, strict=True)):
            units = memory + sizes.rounded_bytes
            worth, head = units + sizes.unit_bytes, sizes.queries * sizes.worth_bytes
            table[:, row, :QUERIES_FIELD] = own[:, :QUERIES_FIELD]
            table[:, row, QUERIES_FIELD:TOPK_FIELD_COUNT] = sizes.queries, memory, units, worth, head, sizes.worth_bytes
            memory = worth + self._kv_heads * head


class _TopkSizes(NamedTuple):
    """Sizes for one row: a KV head's padded queries; bytes of all rounded queries and their units, and of all chunks'
    worth to one query."""

    queries: int
    rounded_bytes: int
    unit_bytes: int
    worth_bytes: int


def wanted_tokens(blocks: Sequence[Block]) -> IntArray:
    """Return the indices of tokens whose logits are wanted: each row's last pending token and its tree's nodes."""
    ends = np.cumsum([len(block) for block in blocks]).tolist()
    return np.concatenate([np.arange(end - len(block.tree) - 1, end) for end, block in zip(ends, blocks, strict=True)])


def address(table: bytearray | IntArray) -> int:
    """Return a table's address."""
    return int(np.frombuffer(table, np.uint8).ctypes.data) if isinstance(table, bytearray) else int(table.ctypes.data)


def _whole(size: int, unit: int) -> int:
    return unit * math.ceil(size / unit)
