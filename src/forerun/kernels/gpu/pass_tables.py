"""Tables in a GPU's memory of where a pass's tokens, keys and values are, filled by one transfer.

A pass that is recorded once and replayed (``models/forward/cuda_graphs.py``) needs tables of fixed size. So tables may
be larger than a pass: padding tokens belong to a spare row, whose memory is not read, and padding tiles are empty.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.block import Block, JoinedBlocks
from forerun.core.compiling import compiled
from forerun.core.tree import IntArray

GPU_BLOCK_TOKENS = 64
"""Positions per block. A tree's keys begin at one. Attention of one token of Llama-3-8B's shape over 122,000 keys costs
236, 185 and 188 us with blocks of 32, 64 and 128 (H200); with 128, some kernels run out of registers."""
GPU_COMBINE_QUERIES = 16
"""Queries per small tile: a tensor core's minimum."""
GPU_TILE_QUERIES = 32
"""Queries per large tile, for rows that have more than fit a small one: their keys are read half as often. Both sizes
use the same tensor-core instruction (tested), and so sum in the same order."""
GPU_SHORT_SPLIT_TOKENS = 256
"""Positions per split at the start of a sequence. Eight KV heads at position 2,048 then occupy 64 programs."""
GPU_SHORT_SPLITS = 16
"""Number of such splits; they end at position 4,096."""
GPU_SPLIT_TOKENS = 1024
"""Positions per later split, a multiple of the others. At position 122,000, 132 splits have to be merged, and the
states of a pass over 16 tokens are a sixteenth of the keys and values that it reads."""
SCAN_PROGRAMS_PER_PROCESSOR = 8
"""Programs per GPU processor that a scan is spread over. A Hopper runs three at a time, so the last round of eight
leaves little idle; many more would repeat loads. To try: 2 and 4 (``benchmarks gpu``, part ``choices``)."""
RECORDED_OWN_KEYS = 128
"""Maximum keys that only one token of a recorded pass sees: a block's, and a draft's of 64 tokens."""
ROW_CUT_INTEGERS = 7
"""Integers per row of ``cuts``: four of ``JoinedBlocks``, the longest scan's end, tiles, splits."""
WRITTEN = ("ids", "positions", "wanted", "tokens", "own", "rows", "tiles", "jobs")
NO_GPU_NOISE = np.zeros((0, 2), np.int64)
TABLE_ALIGNMENT = 16
"""Alignment of tables and rows in bytes: Triton compiles another kernel for unaligned pointers."""


class TableSizes(NamedTuple):
    """The size of a pass."""

    layers: int
    rows: int
    tokens: int
    tiles: int
    tile: int
    own: int  # maximum keys that only one token sees
    wanted: int  # tokens with logits
    splits: int
    programs: int  # that a KV head's scan is spread over, unless there are more tiles

    @property
    def merging(self) -> bool:
        """Whether one program merges a tile's splits without storing states: if tiles fill half of all programs."""
        return 2 * self.tiles >= self.programs

    @property
    def jobs(self) -> int:
        """Programs of a KV head's scan."""
        return self.tiles if self.merging else min(self.programs, self.tiles * max(1, self.splits))

    def rounded(self, group: int) -> TableSizes:
        """Round up to few sizes, with a spare row: tokens and rows to powers of two, splits to a power of four."""
        tokens, rows = _next_power(self.tokens, 2), _next_power(self.rows, 2)
        tiles = min((tokens * group + rows * (self.tile - 1)) // self.tile, tokens * -(-group // self.tile))
        splits = max(GPU_SHORT_SPLITS, _next_power(self.splits, 4))
        return TableSizes(
            self.layers, rows + 1, tokens, tiles, self.tile, RECORDED_OWN_KEYS, tokens, splits, self.programs
        )


def _next_power(number: int, base: int) -> int:
    power = 1
    while power < number:
        power *= base
    return power


class PassTables:
    """The tables of a pass, as views of one block of memory; ``R`` rows, ``T`` tiles, ``P`` programs. ``aligned``:
    whether all addresses and strides are multiples of 16."""

    def __init__(self, sizes: TableSizes, device: torch.device, aligned: bool = True) -> None:
        self.sizes, self.aligned = sizes, aligned
        shapes = {
            "ids": (sizes.tokens,), "positions": (sizes.tokens,), "wanted": (sizes.wanted,),
            "noise": (sizes.wanted, 2),
            "addresses": (sizes.layers, sizes.rows, 2), "strides": (sizes.layers, sizes.rows, 4),
            "tokens": (sizes.tokens, 4), "own": (sizes.tokens, sizes.own), "rows": (sizes.rows, 3),
            "tiles": (sizes.tiles, 2), "jobs": (sizes.jobs, 3),
        }  # fmt: skip
        total = sum(_padded(shape) for shape in shapes.values())
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = self._host if device.type == "cpu" else torch.zeros(total, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        self._tables: dict[str, IntArray] = {}
        first = 0
        for name, shape in shapes.items():
            last = first + int(np.prod(shape))
            self._tables[name] = self._host.numpy()[first:last].reshape(shape)
            setattr(self, name, self._there[first:last].view(shape))
            first += _padded(shape)

    @classmethod
    def of(cls, batch: PassDescription, device: torch.device, ids: torch.Tensor | None = None) -> PassTables:
        """Make and fill tables of a pass's size; ``ids`` as for ``fill``."""
        places = cls(batch.sizes, device, batch.aligned)
        places.fill(batch, ids=ids)
        return places

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    noise: torch.Tensor  # of each wanted token's choice, ``[wanted, 2]``; see ``Block``
    addresses: torch.Tensor  # of keys and values, ``[layers, R, 2]``
    strides: torch.Tensor  # between heads and between tokens, of keys and of values, ``[layers, R, 4]``
    tokens: torch.Tensor  # each token's row, slot in the row's memory, position, and end of its scan, ``[n, 4]``
    own: torch.Tensor  # slots of the keys from the end of a token's scan to its position, ``[n, width]``
    rows: torch.Tensor  # first token, number of tokens, and first tile, ``[R, 3]``
    tiles: torch.Tensor  # row, and number within the row, ``[T, 2]``
    jobs: torch.Tensor  # tile, first split, and step between splits (0 for none), ``[P, 3]``

    def fill(self, batch: PassDescription, spare: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> None:
        """Describe a pass. In larger tables, all tokens, heads and layers of the spare row share ``spare``, memory for
        a key and a value, ``[2, width]``. ``ids``: token ids ``[n]`` on the device, replacing the pass's."""
        size, tables = batch.sizes, self._tables
        if self._copied is not None:
            self._copied.synchronize()
        self._host.zero_()
        tables["addresses"][:, : size.rows] = batch.addresses
        tables["strides"][:, : size.rows] = batch.strides
        _write(batch.cuts, batch.parents, batch.ids, size.tile, self.sizes.merging, *(tables[name] for name in WRITTEN))
        tables["noise"][: len(batch.noise)] = batch.noise
        if spare is not None:
            tables["addresses"][:, size.rows] = spare[0].data_ptr(), spare[1].data_ptr()
            tables["tokens"][size.tokens :] = size.rows, 0, -1, 0
            tables["tiles"][size.tiles :, 0] = size.rows
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        if ids is not None:
            self.ids[: len(ids)].copy_(ids)


def _padded(shape: tuple[int, ...]) -> int:
    """Return a table's size in numbers, so that the next one begins at a multiple of ``TABLE_ALIGNMENT`` bytes."""
    multiple = TABLE_ALIGNMENT // 8
    return -(-int(np.prod(shape)) // multiple) * multiple


class PassDescription:
    """A pass, described for ``PassTables``. ``programs``: that a KV head's scan is spread over (``scan_programs``);
    ``places``: index of each block's first token in its row's memory, by default the blocks' starts; ``positions``:
    that token's for the model, by default ``places``; ``aligned``: as in ``PassTables``, if known."""

    def __init__(
        self, blocks: Sequence[Block], addresses: IntArray, strides: IntArray, group: int, programs: int,
        places: Sequence[int] | None = None, positions: Sequence[int] | None = None, aligned: bool | None = None,
    ) -> None:  # fmt: skip
        self.addresses, self.strides, self.group = addresses, strides, group
        self.aligned = are_aligned(addresses, strides) if aligned is None else aligned
        sampled = any(block.noise is not None for block in blocks)
        self.noise = np.concatenate(list(map(_noise, blocks))) if sampled else NO_GPU_NOISE
        self.cuts, self.ids, self.parents = JoinedBlocks.of(blocks, ROW_CUT_INTEGERS, places, positions)
        longest, own, furthest = _measure(self.cuts, self.parents)
        small = _next_power(longest, 2) * group <= GPU_COMBINE_QUERIES  # rounded: one tile per recorded size
        tile = GPU_COMBINE_QUERIES if small else GPU_TILE_QUERIES
        tiles = 0
        for cut in self.cuts:
            cut[5:] = -(-int(cut[1]) * group // tile), splits_of(int(cut[4]))
            tiles += int(cut[5])
        self.sizes = TableSizes(
            len(addresses), len(blocks), len(self.ids), tiles, tile, own + own % 2, len(blocks) + len(self.parents),
            splits_of(furthest), programs,
        )  # fmt: skip

    def moved(self, addresses: IntArray, strides: IntArray) -> PassDescription:
        """Return this pass over rows stored elsewhere."""
        other = copy.copy(self)
        other.addresses, other.strides, other.aligned = addresses, strides, are_aligned(addresses, strides)
        return other


def _noise(block: Block) -> IntArray:
    return np.zeros((block.nodes + 1, 2), np.int64) if block.noise is None else block.noise


def are_aligned(addresses: IntArray, strides: IntArray) -> bool:
    """Return whether all addresses and strides are multiples of 16."""
    return not ((addresses % TABLE_ALIGNMENT).any() or (strides % TABLE_ALIGNMENT).any())


def splits_of(length: int) -> int:
    """Return the number of splits that cover ``length`` positions."""
    short = GPU_SHORT_SPLITS * GPU_SHORT_SPLIT_TOKENS
    return -(-min(length, short) // GPU_SHORT_SPLIT_TOKENS) + -(-max(length - short, 0) // GPU_SPLIT_TOKENS)


def scan_programs(device: torch.device, kv_heads: int) -> int:
    """Return over how many programs to spread a KV head's scan; an interpreting CPU counts as one processor."""
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    return max(1, SCAN_PROGRAMS_PER_PROCESSOR * processors // kv_heads)


@compiled
def share_programs(tiles: IntArray, splits: IntArray, merging: bool, jobs: IntArray) -> int:
    """Write the table ``jobs``, given each row's tiles and the splits of their scans; return how many jobs there are.
    Tiles share the programs in proportion to their splits, so that one long row does not keep short ones waiting."""
    spare, total, tile, job = len(jobs), 0, 0, 0
    for row in range(len(tiles)):
        spare, total = spare - tiles[row], total + tiles[row] * splits[row]
    for row in range(len(tiles)):
        most = max(splits[row], 1)
        share = 1 if merging else min(1 + max(0, spare) * splits[row] // max(1, total), most)
        for i in range(tiles[row] * share):
            jobs[job, 0], jobs[job, 1], jobs[job, 2] = tile + i // share, i % share, share
            job += 1
        tile += tiles[row]
    return job


@compiled
def _measure(cuts: IntArray, parents: IntArray) -> tuple[int, int, int]:
    """Write the end of each row's longest scan; return the most tokens of a row, the most private keys of a token, and
    the longest scan's end."""
    longest, own, furthest, node = 0, 0, 0, 0
    for row in range(len(cuts)):
        pending, nodes, end = cuts[row, 0], cuts[row, 1] - cuts[row, 0], cuts[row, 2] + cuts[row, 0]
        if _is_chain(parents, node, nodes):
            cuts[row, 4] = end + nodes
        else:
            cuts[row, 4], deepest = end, 0
            for i in range(nodes):
                deepest = max(deepest, _depth(parents, node, i))
            own = max(own, end - _base(end) + deepest)
        longest, furthest, node = max(longest, pending + nodes), max(furthest, cuts[row, 4]), node + nodes
    return longest, own, furthest


@compiled
def _write(
    cuts: IntArray, parents: IntArray, given: IntArray, tile: int, merging: bool, ids: IntArray, positions: IntArray,
    wanted: IntArray, tokens: IntArray, own: IntArray, rows: IntArray, tiles: IntArray, jobs: IntArray,
) -> None:  # fmt: skip
    token, node, output, first = 0, 0, 0, 0
    for i in range(len(given)):
        ids[i] = given[i]
    for row in range(len(cuts)):
        pending, count, start, shift = cuts[row, 0], cuts[row, 1], cuts[row, 2], cuts[row, 3] - cuts[row, 2]
        nodes, end = count - pending, start + pending
        chain, base = _is_chain(parents, node, nodes), _base(end)
        for i in range(count):
            in_order = chain or i < pending
            depth = 0 if in_order else _depth(parents, node, i - pending)
            place = start + i if in_order else end - 1 + depth
            at = token + i
            tokens[at, 0], tokens[at, 1], tokens[at, 2] = row, start + i, place
            tokens[at, 3] = place + 1 if in_order else base
            positions[at] = place + shift
            if not in_order:
                _write_own(parents[node : node + nodes], i - pending, base, end, own[at, : end - base + depth])
        for i in range(nodes + 1):
            wanted[output + i] = token + pending - 1 + i
        rows[row, 0], rows[row, 1], rows[row, 2] = token, count, first
        for number in range(cuts[row, 5]):
            tiles[first + number, 0], tiles[first + number, 1] = row, number
        token, node, output, first = token + count, node + nodes, output + nodes + 1, first + cuts[row, 5]
    share_programs(cuts[:, 5], cuts[:, 6], merging, jobs)


@compiled
def _write_own(parents: IntArray, node: int, base: int, end: int, own: IntArray) -> None:
    """Write the slots from ``base`` to ``end`` that a node sees, and those of its ancestors and itself, in order."""
    for key in range(base, end):
        own[key - base] = key
    column = len(own) - 1
    while node >= 0:
        own[column] = end + node
        node, column = parents[node], column - 1


@compiled
def _is_chain(parents: IntArray, first: int, nodes: int) -> bool:
    chain = True
    for i in range(nodes):
        chain &= parents[first + i] == i - 1
    return chain


@compiled
def _depth(parents: IntArray, first: int, node: int) -> int:
    depth = 0
    while node >= 0:
        node, depth = parents[first + node], depth + 1
    return depth


@compiled
def _base(end: int) -> int:
    """Return where a tree's scan ends: at the last block boundary before the tree."""
    return end // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS
