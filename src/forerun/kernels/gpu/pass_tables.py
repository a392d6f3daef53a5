"""Tables in a GPU's memory of where a pass's tokens, keys and values are, filled by one transfer.

A pass that is recorded once and replayed (``models/forward/cuda_graphs.py``) needs tables of fixed size. So tables may
be larger than a pass: padding tokens belong to a spare row, whose memory is not read, and padding tiles are empty.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.block import Block
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
leaves little idle; many more would repeat reading queries and tables. To be tried on a card: 2 and 4
(``python -m benchmarks gpu``, part ``choices``)."""
RECORDED_OWN_KEYS = 128
"""Maximum keys that only one token of a recorded pass sees: a block's, and a draft's of 64 tokens."""
TABLE_ALIGNMENT = 16
"""Alignment of tables and rows in bytes: Triton compiles another kernel for unaligned pointers."""


class TableSizes(NamedTuple):
    """The size of a pass.

    Attributes:
        own: maximum keys that only one token sees.
        wanted: tokens with logits.
        splits: of the longest scan.
        programs: that a KV head's scan is spread over, unless there are more tiles.
    """

    layers: int
    rows: int
    tokens: int
    tiles: int
    tile: int
    own: int
    wanted: int
    splits: int
    programs: int

    @property
    def merging(self) -> bool:
        """Whether one program runs and merges all splits of a tile, without storing states: if tiles keep half of all
        programs busy."""
        return 2 * self.tiles >= self.programs

    @property
    def jobs(self) -> int:
        """Programs of a KV head's scan."""
        return self.tiles if self.merging else min(self.programs, self.tiles * max(1, self.splits))

    def rounded(self, group: int) -> TableSizes:
        """Round up to one of few sizes, with a spare row, for ``group`` query heads per KV head: tokens and rows to
        powers of two, the sequence's splits to a power of four."""
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
    """The tables of a pass, as views of one block of memory; ``R`` rows, ``T`` tiles, ``P`` programs.

    Attributes:
        ids, positions: of the tokens, ``[n]``.
        wanted: indices of the tokens with logits.
        addresses: of keys and values, ``[layers, R, 2]``.
        strides: between heads and between tokens, of keys and of values, ``[layers, R, 4]``.
        tokens: each token's row, slot in the row's memory, position, and end of its scan, ``[n, 4]``.
        own: slots of the keys from the end of a token's scan to its position, ``[n, width]``.
        rows: first token, number of tokens, and first tile, ``[R, 3]``.
        tiles: row, and number within the row, ``[T, 2]``.
        jobs: tile, first split, and step between splits (0 for none), ``[P, 3]``.
        aligned: whether all addresses and strides are multiples of 16.
    """

    def __init__(self, sizes: TableSizes, device: torch.device, aligned: bool = True) -> None:
        self.sizes, self.aligned = sizes, aligned
        shapes = {
            "ids": (sizes.tokens,), "positions": (sizes.tokens,), "wanted": (sizes.wanted,),
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

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    addresses: torch.Tensor
    strides: torch.Tensor
    tokens: torch.Tensor
    own: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor
    jobs: torch.Tensor

    def fill(self, batch: PassDescription, spare: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> None:
        """Describe a pass.

        If the tables are larger than the pass, ``spare`` is memory for a key and a value of the spare row,
        ``[2, width]``, shared by all its tokens, heads and layers. ``ids`` are token ids ``[n]`` on the device,
        replacing the pass's.
        """
        size = batch.sizes
        if self._copied is not None:
            self._copied.synchronize()
        if spare is not None:  # clear the previous pass
            self._host.zero_()
        for name, table in batch.tables.items():
            self._tables[name][tuple(map(slice, table.shape))] = table
        jobs = scan_jobs(batch.splits, self.sizes)
        self._tables["jobs"][...] = 0
        self._tables["jobs"][: len(jobs)] = jobs
        if spare is not None:
            self._tables["addresses"][:, size.rows] = spare[0].data_ptr(), spare[1].data_ptr()
            self._tables["strides"][:, size.rows] = 0
            self._tables["tokens"][size.tokens :] = size.rows, 0, -1, 0
            self._tables["tiles"][size.tiles :, 0] = size.rows
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
    """A pass, described for ``PassTables``. ``splits`` are of each tile's scan, ``[T]``.

    Args:
        blocks: each row's input; its start is the number of tokens in the row's memory.
        group: query heads per KV head.
        programs: that a KV head's scan is spread over; see ``scan_programs``.
        aligned: whether all addresses and strides are multiples of 16, if known.
    """

    def __init__(
        self, blocks: Sequence[Block], addresses: IntArray, strides: IntArray, positions: IntArray, group: int,
        programs: int, aligned: bool | None = None,
    ) -> None:  # fmt: skip
        counts = [len(block) for block in blocks]
        small = _next_power(max(counts), 2) * group <= GPU_COMBINE_QUERIES  # rounded: one tile per recorded size
        tile = GPU_COMBINE_QUERIES if small else GPU_TILE_QUERIES
        self.group = group
        self.aligned = are_aligned(addresses, strides) if aligned is None else aligned
        tiles = [-(-count * group // tile) for count in counts]
        ends, own = list(accumulate(counts)), [_own(block) for block in blocks]
        most = max(each.shape[1] for each in own)
        wanted = [at for end, block in zip(ends, blocks, strict=True) for at in range(end - len(block.tree) - 1, end)]
        tokens = np.concatenate([_tokens(row, block) for row, block in enumerate(blocks)])
        self.tables: dict[str, IntArray] = {
            "ids": np.concatenate([block.tokens for block in blocks]),
            "positions": positions,
            "wanted": np.array(wanted),
            "addresses": addresses,
            "strides": strides,
            "tokens": tokens,
            "own": np.concatenate([np.pad(each, ((0, 0), (0, most - each.shape[1]))) for each in own] if most else own),
            "rows": np.array(list(zip([0, *ends], counts, [0, *accumulate(tiles)], strict=False))),
            "tiles": np.array([(row, number) for row, count in enumerate(tiles) for number in range(count)]),
        }
        longest = np.maximum.reduceat(tokens[:, 3], [0, *ends[:-1]]).tolist()
        row_splits = [splits_of(length) for length in longest]
        self.splits: IntArray = np.repeat(np.array(row_splits), tiles)
        self.sizes = TableSizes(
            len(addresses), len(blocks), len(tokens), sum(tiles), tile, most + most % 2, len(wanted), max(row_splits),
            programs,
        )  # fmt: skip

    def moved(self, addresses: IntArray, strides: IntArray) -> PassDescription:
        """Return this pass over rows stored elsewhere."""
        other = copy.copy(self)
        other.tables = self.tables | {"addresses": addresses, "strides": strides}
        other.aligned = are_aligned(addresses, strides)
        return other


def are_aligned(addresses: IntArray, strides: IntArray) -> bool:
    """Return whether all addresses and strides are multiples of 16."""
    return not ((addresses % TABLE_ALIGNMENT).any() or (strides % TABLE_ALIGNMENT).any())


def splits_of(length: int) -> int:
    """Return the number of splits that cover ``length`` positions."""
    short = GPU_SHORT_SPLITS * GPU_SHORT_SPLIT_TOKENS
    return -(-min(length, short) // GPU_SHORT_SPLIT_TOKENS) + -(-max(length - short, 0) // GPU_SPLIT_TOKENS)


def scan_programs(device: torch.device, kv_heads: int) -> int:
    """Return over how many programs to spread a KV head's scan. A CPU, which interprets them, counts as one
    processor."""
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    return max(1, SCAN_PROGRAMS_PER_PROCESSOR * processors // kv_heads)


def scan_jobs(splits: IntArray, sizes: TableSizes) -> IntArray:
    """Return the table ``jobs``, given each tile's splits, ``[T]``. Tiles share the programs in proportion to their
    splits, so that one long row does not keep short ones waiting."""
    shares = np.ones_like(splits)
    if not sizes.merging:
        spare = max(0, sizes.jobs - len(splits))
        shares = np.clip(1 + spare * splits // max(1, int(splits.sum())), 1, np.maximum(splits, 1))
    ends = np.cumsum(shares)
    part = np.arange(ends[-1]) - np.repeat(ends - shares, shares)
    return np.stack((np.repeat(np.arange(len(splits)), shares), part, np.repeat(shares, shares)), 1)


def _base(block: Block) -> int:
    """Return the end of a tree's scan: the last block boundary before the tree."""
    return (block.start + len(block.pending)) // GPU_BLOCK_TOKENS * GPU_BLOCK_TOKENS


def _tokens(row: int, block: Block) -> IntArray:
    first, count = block.start, len(block)
    if block.tree.is_chain:  # slots equal positions
        return np.array([(row, at, at, at + 1) for at in range(first, first + count)])
    tokens = np.stack((np.full(count, row), first + np.arange(count), block.positions, block.positions + 1), 1)
    tokens[len(block.pending) :, 3] = _base(block)
    return tokens


def _own(block: Block) -> IntArray:
    if block.tree.is_chain:
        return np.zeros((len(block), 0), np.int64)
    pending, n, end = len(block.pending), len(block), block.start + len(block.pending)
    before = np.arange(_base(block), end)
    own = np.zeros((n, len(before) + int(block.tree.depths.max())), np.int64)
    for node, above in enumerate(block.tree.ancestors):
        slots = np.concatenate((before, end + np.flatnonzero(above)))
        own[pending + node, : len(slots)] = slots
    return own
