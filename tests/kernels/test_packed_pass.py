"""The tables of a pass, beside their definition in Python."""

import math
from typing import Any

import numpy as np
import pytest

from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree
from forerun.kernels.attention.attention_fields import ROW_BYTES, UNIT_BYTES
from forerun.kernels.attention.attention_tile import TILE_QUERIES
from forerun.kernels.attention.ordered_attention import ALL_SPLITS, SPLIT_TOKENS
from forerun.kernels.attention.packed_pass import (
    MANY_TILES,
    UNIT_TILES,
    UNITS_PER_THREAD,
    HeadShape,
    PackedPass,
    wanted_tokens,
)
from forerun.kernels.attention.tile_states import tile_bytes

TREE = DraftTree(np.arange(7), np.array([ROOT, 0, ROOT, 2, 2, 4, 0]))
EMPTY = DraftTree.empty()
PASSES = {
    "one token": [Block(np.array([3]), EMPTY, 10)],
    "a chain": [Block(np.array([3]), DraftTree.chain(np.arange(5)), 300)],
    "a tree": [Block(np.arange(3), TREE, 0)],
    "rows of all kinds": [Block(np.arange(4), EMPTY, 0), Block(np.array([1]), TREE, 600),
        Block(np.array([1]), DraftTree.chain(np.arange(9)), 255)],
    "a long prompt": [Block(np.arange(500), EMPTY, 40), Block(np.array([1]), EMPTY, 4000)],
}  # fmt: skip


def units_of(block: Block, place: int, row: int, rows: int, heads: HeadShape, threads: int) -> tuple[Any, int]:
    """A row's units, and its splits."""
    chain, tiles = block.tree.is_chain, math.ceil(len(block) * heads.group / TILE_QUERIES)
    in_order = len(block) if chain else len(block.pending)
    splits = 0 if chain and tiles > MANY_TILES else math.ceil((place + in_order) / SPLIT_TOKENS)
    if splits:
        share = max(1, math.ceil(tiles / math.ceil(UNITS_PER_THREAD * threads / (splits * heads.kv_heads * rows))))
    else:
        share = min(UNIT_TILES, max(1, tiles // (UNITS_PER_THREAD * threads)))
    numbers = range(splits) if splits else (ALL_SPLITS,)
    return [[row, n, cut, min(cut + share, tiles)] for n in numbers for cut in range(0, tiles, share)], splits


@pytest.mark.parametrize("heads", [HeadShape(1, 1, 16, 16), HeadShape(9, 3, 64, 64), HeadShape(32, 2, 128, 64)])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("moved", [0, 32])
def test_tables_are_those_of_the_definition(name, heads, moved):
    blocks, threads = PASSES[name], 2
    places, starts = [block.start + moved for block in blocks], [block.start for block in blocks]
    packed = PackedPass(blocks, heads, threads, places, starts)
    strides = [(1 + row, 2 + row, 3 + row, 4 + row) for row in range(len(blocks))]
    packed.fields(strides)
    table = packed.table("rows").reshape(len(blocks), ROW_BYTES // 8)
    units, first, states, most = list[list[int]](), 0, 0, 0
    for row, (block, place) in enumerate(zip(blocks, places, strict=True)):
        own, splits = units_of(block, place, row, len(blocks), heads, threads)
        in_order = len(block) if block.tree.is_chain else len(block.pending)
        assert table[row, :10].tolist() == [first, len(block), in_order, place, *strides[row], states, splits]
        tiles = math.ceil(len(block) * heads.group / TILE_QUERIES)
        states += max(splits, 1) * tiles * heads.kv_heads * tile_bytes(heads.out_dim)
        units += own
        most = max(most, *(last - begin for *_, begin, last in own))
        first += len(block)
    assert packed.table("units").reshape(-1, UNIT_BYTES // 8)[:, :4].tolist() == units
    assert (packed.unit_count, packed.most_tiles, packed.states_bytes) == (len(units), most, states)
    for table_name, firsts in (("cache_positions", places), ("positions", starts)):
        expected = np.concatenate([start + block.offsets for block, start in zip(blocks, firsts, strict=True)])
        assert packed.table(table_name).tolist() == expected.tolist()
    ids = np.concatenate([block.tokens for block in blocks])
    assert packed.table("ids").tolist() == ids.tolist()
    assert packed.bounds == (ids.min(), ids.max(), expected.max())
    assert packed.table("output_indices").tolist() == wanted_tokens(blocks).tolist()
    assert packed.outputs == len(wanted_tokens(blocks))
    rows = [row for row, block in enumerate(blocks) for _ in range(len(block))]
    assert packed.table("token_rows").tolist() == rows
    above = np.concatenate([[-1] * len(block.pending) + block.tree.parents.tolist() for block in blocks])
    assert packed.table("parents").tolist() == above.tolist()
