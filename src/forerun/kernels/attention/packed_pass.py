"""A pass as the kernels see it: all rows' tokens side by side, and tables of addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np

from forerun.core.block import Block, JoinedBlocks
from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.kernels.attention import float64_attention, ordered_attention, topk_attention, topk_rank
from forerun.kernels.attention.attention_fields import ROW_BYTES, UNIT_BYTES, RowFields
from forerun.kernels.attention.attention_tile import TILE_QUERIES
from forerun.kernels.attention.ordered_attention import ALL_SPLITS, SPLIT_TOKENS
from forerun.kernels.attention.tile_states import size_of_tile
from forerun.kernels.attention.topk_rank import GROUP_CHUNKS, RANK_UNIT_BYTES, TopkFields
from forerun.kernels.runtime.vector_ir import LINE

MANY_TILES = 64
"""Tiles of queries from which on a row is not cut into splits: enough work for all threads, and no states to keep."""
UNIT_TILES = 32
"""Tiles per unit in that case; their states fit in the nearer caches."""
UNITS_PER_THREAD = 4
"""Units per thread of a shorter row, so that threads finish at about the same time."""
CUT_INTEGERS = 9
"""Integers per row in the table of ``_cut`` and ``_fill``, of which ``JoinedBlocks`` has four."""
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
    """The blocks of all rows. ``places``: index of each block's first token in its row's memory, by default the blocks'
    starts; ``positions``: that token's position for the model, by default ``places``."""

    def __init__(
        self, blocks: Sequence[Block], heads: HeadShape, threads: int, places: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.blocks, self.heads, self.threads = blocks, heads, threads
        self.places = [block.start for block in blocks] if places is None else places
        self.counts = [block.count for block in blocks]
        self.n, rows = sum(self.counts), len(blocks)
        cuts, tokens, parents = JoinedBlocks.of(blocks, CUT_INTEGERS, places, positions)
        self.unit_count, self.most_tiles, self.states_bytes = _cut(
            cuts, parents, heads.group, heads.kv_heads, threads, heads.out_dim
        )
        self.outputs = rows + len(parents)  # tokens whose logits are wanted
        sizes = (rows * ROW_INTEGERS, self.unit_count * UNIT_INTEGERS, *[self.n] * 5, self.outputs)
        self._ends = list(accumulate(sizes, initial=0))
        self._memory = np.zeros(self._ends[-1], np.int64)
        # the least and the greatest token id, and the greatest position for the model
        self.bounds = _fill(cuts, parents, tokens, self._memory, self.unit_count)
        self.longest = max(map(add, self.places, self.counts))

    @property
    def slot_size(self) -> int:
        """Scratch bytes per thread."""
        return scratch_bytes(self.heads, self.most_tiles, self.longest)

    def table(self, name: str) -> IntArray:
        index = TABLES.index(name)
        return self._memory[self._ends[index] : self._ends[index + 1]]

    def fields(
        self, strides: Sequence[tuple[int, int, int, int]] = (), work: TopkTables | None = None
    ) -> dict[str, int]:
        """Return the ``PassFields`` of the tokens and of attention, without memory, valid until the next call.
        ``strides``: each cache's byte strides: heads and rows of keys, then of values; ``work`` replaces the units."""
        if strides:
            self._memory[: self._ends[1]].reshape(-1, ROW_INTEGERS)[:, STRIDES] = strides
        begin = self._memory.ctypes.data
        fields = {name: begin + 8 * end for name, end in zip(TABLES, self._ends, strict=False)}
        fields |= {"n": self.n, "unit_count": self.unit_count, "outputs": self.outputs}
        return fields if work is None else fields | {"units": address(work.units), "unit_count": work.unit_count}


@compiled
def _cut(cuts: IntArray, parents: IntArray, group: int, kv_heads: int, threads: int, dim: int) -> tuple[int, int, int]:
    """Cut rows into units, and place their states; return the number of units, most tiles in one, and bytes of states.
    After the columns of ``JoinedBlocks``, ``cuts`` receives each row's tiles, its splits, tiles per unit, the offset of
    its states and its tokens in sequence order. ``dim`` is that of values."""
    tile = size_of_tile(dim)
    units, most, states, node = 0, 0, 0, 0
    for row in range(len(cuts)):
        pending, count, place = cuts[row, 0], cuts[row, 1], cuts[row, 2]
        chain, nodes = True, count - pending
        for i in range(nodes):
            chain &= parents[node + i] == i - 1
        node += nodes
        in_order = count if chain else pending
        tiles = -(-count * group // TILE_QUERIES)
        splits = 0 if chain and tiles > MANY_TILES else -(-(place + in_order) // SPLIT_TOKENS)
        if splits:
            wanted = -(-UNITS_PER_THREAD * threads // (splits * kv_heads * len(cuts)))
            share = max(1, -(-tiles // wanted))
        else:
            share = min(UNIT_TILES, max(1, tiles // (UNITS_PER_THREAD * threads)))
        cuts[row, 4], cuts[row, 5], cuts[row, 6], cuts[row, 7], cuts[row, 8] = tiles, splits, share, states, in_order
        units += max(splits, 1) * -(-tiles // share)
        most = max(most, min(share, tiles))
        states += max(splits, 1) * tiles * kv_heads * tile
    return units, most, states


@compiled
def _fill(
    cuts: IntArray, parents: IntArray, tokens: IntArray, memory: IntArray, unit_count: int
) -> tuple[int, int, int]:
    first, n = len(cuts) * ROW_INTEGERS, len(tokens)
    last = first + unit_count * UNIT_INTEGERS
    rows = memory[:first].reshape((len(cuts), ROW_INTEGERS))
    units = memory[first:last].reshape((unit_count, UNIT_INTEGERS))
    each = memory[last : last + 5 * n].reshape((5, n))
    token_rows, places, above, ids, positions = each[0], each[1], each[2], each[3], each[4]
    wanted = memory[last + 5 * n :]
    token, node, unit, output, furthest = 0, 0, 0, 0, 0
    for row in range(len(cuts)):
        pending, count, place, splits = cuts[row, 0], cuts[row, 1], cuts[row, 2], cuts[row, 5]
        rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = token, count, cuts[row, 8], place
        rows[row, 8], rows[row, 9] = cuts[row, 7], splits
        root, nodes, shift = token + pending - 1, count - pending, cuts[row, 3] - place
        for i in range(count):
            parent = parents[node + i - pending] if i >= pending else i - 1 - pending
            before = root + 1 + parent
            places[token + i] = place if i == 0 else places[before] + 1
            token_rows[token + i], above[token + i] = row, max(parent, -1)
            positions[token + i] = places[token + i] + shift
            furthest = max(furthest, positions[token + i])
        for i in range(nodes + 1):
            wanted[output + i] = root + i
        for split in range(max(splits, 1)):
            for tile in range(0, cuts[row, 4], cuts[row, 6]):
                units[unit, 0], units[unit, 1] = row, split if splits else ALL_SPLITS
                units[unit, 2], units[unit, 3] = tile, min(tile + cuts[row, 6], cuts[row, 4])
                unit += 1
        token, node, output = token + count, node + nodes, output + nodes + 1
    least = most = tokens[0]
    for i in range(n):
        ids[i] = tokens[i]
        least, most = min(least, tokens[i]), max(most, tokens[i])
    return least, most, furthest


def scratch_bytes(heads: HeadShape, tiles: int, places: int) -> int:
    """Return the scratch bytes per thread for ``tiles`` tiles in a unit, and sequences of ``places`` tokens."""
    scan = ordered_attention.scratch_bytes(tiles, heads.group, heads.dim, heads.out_dim)
    return max(scan, float64_attention.scratch_bytes(places, heads.out_dim))


class TopkTables:
    """What all rows' queries choose among; replaces the units of ``PackedPass``. ``tables`` has for each row one row of
    ``TopkFields`` per layer, with 0 in the fields that depend on the pass. ``worth_offset``, ``worth_chunks``: where
    the worth of the last row's chunks starts, and its capacity."""

    def __init__(self, packed: PackedPass, tables: Sequence[IntArray]) -> None:
        self._tables, self._sizes = tables, list[_TopkSizes]()  # by row
        heads, ranked, self.slot_size, self.states_bytes = packed.heads, [], 0, 0
        for table, place, count in zip(tables, packed.places, packed.counts, strict=True):
            chunks, most, rank = (int(table[0, field]) for field in (CHUNKS_FIELD, MOST_FIELD, RANK_FIELD))
            ranked.append(chunks if most < chunks else 0)
            padded, worth = topk_rank.padded_queries(count, heads.group), 4 * _rounded_up(ranked[-1], GROUP_CHUNKS)
            every, self.worth_chunks = heads.kv_heads * padded, worth // 4
            self._sizes.append(_TopkSizes(padded, _rounded_up(every * rank, LINE), _rounded_up(4 * every, LINE), worth))
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


def _rounded_up(size: int, unit: int) -> int:
    return unit * math.ceil(size / unit)
