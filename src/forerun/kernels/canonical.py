"""Attention in one order: a token's bits do not depend on what shares the pass, nor on whether keys were drafted.

Positions are cut into pieces, and those into blocks, at fixed places. Within a piece a query goes block by block with a
running maximum and sum (FlashAttention, Dao et al. 2022; ``tiles.py``); pieces are joined in their order
(Flash-Decoding, Dao et al. 2023). A block in which a query sees nothing changes nothing, to the bit; so it may be skipped
or not. Keys that a drafted token does not share with the others, its ancestors in the tree, are written out in the order
of their positions and go the same way. The second half of what makes speculative decoding exact.

There are two operations. *Scan*: units of a row's pieces and tiles of queries, over the keys that lie in the order of the
text. *Settle*: for each token, join the pieces, go through what only this token sees, and divide.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from forerun.index.compiling import compiled
from forerun.kernels.memory import Job, floats, integers
from forerun.kernels.rowwise import LOG2E, soften, words
from forerun.kernels.tiles import (
    QUERIES,
    STATE,
    TILES,
    VECTORS,
    copy_floats,
    gather,
    gather_vectors,
    score,
    score_tiles,
    weigh,
    widen_bfloat16,
    widen_float16,
)
from forerun.kernels.vector import LANES, LINE, Code, Emitter, intrinsic, intrinsic_code

BLOCK = 32
"""Positions of a block."""
PIECE = 256
"""Positions of a piece: what is summed by itself, so that few heads of a long text keep all threads busy."""
LOWEST = -3e38
"""Where the running maximum begins. Finite, so that differences are numbers."""
SIGHT = 96
"""Bytes that say what a tile's queries see: least and greatest end, least and greatest beginning, and each one's."""
SEQUENTIAL = -1
"""In a unit's place of a piece: all of them, one after the other."""


class RowFields(NamedTuple):
    """One row of the batch.

    Attributes:
        first: its first token in the pass.
        n: its tokens in the pass.
        straight: how many of them lie in the order of the text; the others are a tree's nodes.
        start: committed tokens, the position of the first.
        k_head: bytes from one head's keys to the next one's.
        parts: where its states are in the room for them.
        pieces: how many states there are for each tile; 0 where units go through all pieces themselves.
    """

    first: int
    n: int
    straight: int
    start: int
    k_head: int
    k_row: int
    v_head: int
    v_row: int
    parts: int
    pieces: int


class UnitFields(NamedTuple):
    """What a thread scans at a time: a row's piece (or ``SEQUENTIAL``) and tiles from ``first`` to ``last``."""

    row: int
    piece: int
    first: int
    last: int


class AttendOp(NamedTuple):
    """One layer's attention: addresses, distances in bytes, and counts.

    Attributes:
        code: of the operation, for the tape.
        kind: of keys and values: 0 float32, 1 bfloat16, 2 float16.
        width: bytes of a number of them.
        dim: numbers of a key; ``out_dim`` of a value.
        window: as in ``AttentionSpec``, or 0.
        q: floats, of a token and of a head at these distances.
        kv: addresses of keys and values of this layer, row by row.
        sinks: a number for each head, of the type of the queries, or 0.
        out: a token's heads side by side, of ``out_kind``: 0 float32, 1 bfloat16.
    """

    code: int
    kind: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    out_dim: int
    window: int
    q: int
    q_row: int
    q_head: int
    kv: int
    sinks: int
    out: int
    out_row: int
    out_kind: int
    scale: float
    softcap: float


ROW, UNIT, ATTEND = Job(RowFields), Job(UnitFields), Job(AttendOp)
ROW_BYTES, UNIT_BYTES = ROW.size, UNIT.size
read_row, read_unit, read_attend = ROW.reader(), UNIT.reader(), ATTEND.reader()


def tile_bytes(out_dim: int) -> int:
    """Bytes of a tile's output and state."""
    return QUERIES * out_dim * 4 + STATE


def room(tiles: int, group: int, dim: int, out_dim: int) -> int:
    """Bytes that a thread needs for units of so many tiles, and for settling tokens of so many heads."""
    most, own = max(tiles, 1), math.ceil(group / QUERIES)
    scan = most * (QUERIES * (dim + BLOCK) * 4 + 2 * tile_bytes(out_dim) + SIGHT)
    settle = own * (QUERIES * (dim + BLOCK) * 4 + 2 * tile_bytes(out_dim))
    return max(scan, settle) + BLOCK * (dim + out_dim) * 4 + 8 * LINE


@compiled
def scan(op: AttendOp, rows: int, units: int, positions: int, parts: int, task: int, slot: int) -> None:
    """One unit and KV head: tiles of queries over a piece, or over all of them, one after the other."""
    unit = read_unit(units + task // op.kv_heads * UNIT_BYTES)
    row = read_row(rows + unit.row * ROW_BYTES)
    head, tiles = task % op.kv_heads, unit.last - unit.first
    size = QUERIES * op.out_dim * 4 + STATE
    q = slot
    scores = q + tiles * QUERIES * op.dim * 4
    sight = scores + tiles * QUERIES * BLOCK * 4
    state = sight + SIGHT * tiles
    other = state + tiles * size
    spare = other + tiles * size
    last = _look(op, row, unit, positions, sight)
    _pack_tiles(op, row, unit, head, q)
    all_tiles = _tiles(op, row)
    if unit.piece != SEQUENTIAL:
        to = parts + row.parts + ((unit.piece * op.kv_heads + head) * all_tiles + unit.first) * size
        _clear(op, to, tiles)
        end = min(last, (unit.piece + 1) * PIECE)
        _scan_piece(op, row, unit.row, head, tiles, unit.piece * PIECE, end, q, scores, sight, to, spare)
        return
    _clear(op, state, tiles)
    first = integers(sight + 16, 1)[0]
    for t in range(1, tiles):
        first = min(first, integers(sight + SIGHT * t + 16, 1)[0])
    for piece in range(max(first, 0) // PIECE, (last + PIECE - 1) // PIECE):
        _clear(op, other, tiles)
        end = min(last, (piece + 1) * PIECE)
        _scan_piece(op, row, unit.row, head, tiles, piece * PIECE, end, q, scores, sight, other, spare)
        for t in range(tiles):
            join(state + t * size, other + t * size, op.out_dim // LANES)
    to = parts + row.parts + (head * all_tiles + unit.first) * size
    words(0, state, tiles * size // LINE, to)


@compiled
def settle(
    op: AttendOp, rows: int, owners: int, positions: int, parents: int, parts: int, task: int, slot: int
) -> None:
    """One token and KV head: join its pieces, go through what it alone sees, divide, and write the output."""
    token, head = task // op.kv_heads, task % op.kv_heads
    number = integers(owners + 8 * token, 1)[0]
    row = read_row(rows + number * ROW_BYTES)
    group = op.heads // op.kv_heads
    own = (group + QUERIES - 1) // QUERIES
    size = QUERIES * op.out_dim * 4 + STATE
    running = slot
    part = running + own * size
    rest = part + own * size
    place, position = token - row.first, integers(positions + 8 * token, 1)[0]
    base, seen = _shared(row, place, position)
    all_tiles = _tiles(op, row)
    _clear(op, running, own)
    low = max(0, position - op.window + 1) if op.window else 0
    full = (seen + PIECE - 1) // PIECE
    if row.pieces == 0:
        _take(op, parts + row.parts + head * all_tiles * size, place * group, group, running)
    else:
        # the piece that a tree's node goes on with is not joined yet
        joined = full if place < row.straight else min(full, base // PIECE)
        for piece in range(low // PIECE, joined):
            _take(op, parts + row.parts + (piece * op.kv_heads + head) * all_tiles * size, place * group, group, part)
            for t in range(own):
                join(running + t * size, part + t * size, op.out_dim // LANES)
        if place >= row.straight:
            begun = base // PIECE
            _clear(op, part, own)
            if begun < full and begun >= low // PIECE:
                at = parts + row.parts + (begun * op.kv_heads + head) * all_tiles * size
                _take(op, at, place * group, group, part)
            _own(op, row, number, head, token, place, position, base, low, parents, running, part, rest)
    for g in range(group):
        _divide(op, running, g, token, head * group + g, rest)


@compiled
def _own(
    op: AttendOp, row: RowFields, number: int, head: int, token: int, place: int, position: int, base: int, low: int,
    parents: int, running: int, part: int, rest: int,
) -> None:  # fmt: skip
    """From ``base`` on: a node's own keys, in the order of their positions, block by block and piece by piece."""
    group = op.heads // op.kv_heads
    own = (group + QUERIES - 1) // QUERIES
    size = QUERIES * op.out_dim * 4 + STATE
    q = rest
    scores = q + own * QUERIES * op.dim * 4
    keys = scores + own * QUERIES * BLOCK * 4
    values = keys + BLOCK * op.dim * 4
    for t in range(own):
        _pack(op, token, head * group, t * QUERIES, group, q + t * QUERIES * op.dim * 4)
    k = integers(op.kv + 16 * number, 2)[0] + head * row.k_head
    v = integers(op.kv + 16 * number, 2)[1] + head * row.v_head
    for start in range(base, position + 1, BLOCK):
        if start % PIECE == 0 and start > base:
            for t in range(own):
                join(running + t * size, part + t * size, op.out_dim // LANES)
            _clear(op, part, own)
        if start + BLOCK <= low:
            continue
        _write_out(op, row, k, row.k_row, op.dim, place, position, start, parents, keys)
        _write_out(op, row, v, row.v_row, op.out_dim, place, position, start, parents, values)
        for t in range(own):
            tile, weights = q + t * QUERIES * op.dim * 4, scores + t * QUERIES * BLOCK * 4
            score(tile, keys, 4 * op.dim, op.dim, BLOCK, weights, keys, 0)
            _soften(op, weights, keys)
            for i in range(QUERIES):
                _hide(weights, i, low - start, position + 1 - start)
            state = part + t * size + QUERIES * op.out_dim * 4
            weigh(weights, BLOCK, state)
            _gather(op, weights, state, values, 4 * op.out_dim, part + t * size, values, 0)
    for t in range(own):
        join(running + t * size, part + t * size, op.out_dim // LANES)


@compiled
def _write_out(
    op: AttendOp, row: RowFields, source: int, width: int, dim: int, place: int, position: int, start: int,
    parents: int, to: int,
) -> None:  # fmt: skip
    """Keys or values at the positions of a block that a tree's node sees, as floats; behind them zeros."""
    end = start + BLOCK
    if position + 1 < end:
        floats(to + 4 * (position + 1 - start) * dim, (end - position - 1) * dim)[:] = np.float32(0)
    root = row.start + row.straight  # positions from here on are nodes
    node, at = place - row.straight, position
    while at >= start and at >= root:
        if at < end:
            _row(op, source + (root + node) * width, dim, to + 4 * (at - start) * dim)
        node = integers(parents + 8 * (row.first + row.straight + node), 1)[0]
        at -= 1
    for p in range(start, min(end, root, position + 1)):
        _row(op, source + p * width, dim, to + 4 * (p - start) * dim)


@compiled
def _row(op: AttendOp, source: int, dim: int, to: int) -> None:
    for c in range(0, dim, LANES):
        if op.kind == 0:
            copy_floats(source + c * 4, to + 4 * c)
        elif op.kind == 1:
            widen_bfloat16(source + c * 2, to + 4 * c)
        else:
            widen_float16(source + c * 2, to + 4 * c)


@compiled
def _tiles(op: AttendOp, row: RowFields) -> int:
    return (row.n * (op.heads // op.kv_heads) + QUERIES - 1) // QUERIES


@compiled
def _shared(row: RowFields, place: int, position: int) -> tuple[int, int]:
    """Where a tree's node goes its own way, at the beginning of a block, and up to where a scan takes a token."""
    if place < row.straight:
        return 0, position + 1
    base = (row.start + row.straight) // BLOCK * BLOCK
    return base, base


@compiled
def _look(op: AttendOp, row: RowFields, unit: UnitFields, positions: int, sight: int) -> int:
    """Each tile's least and greatest end and beginning of what its queries see; gives the greatest end of all."""
    group, last = op.heads // op.kv_heads, 0
    for t in range(unit.first, unit.last):
        box = integers(sight + SIGHT * (t - unit.first), 12)
        for i in range(QUERIES):
            place = min(t * QUERIES + i, row.n * group - 1) // group
            position = integers(positions + 8 * (row.first + place), 1)[0]
            end = _shared(row, place, position)[1]
            begin = max(0, position - op.window + 1) if op.window else 0
            box[4 + i], box[8 + i] = end, begin
            if i == 0:
                box[0] = box[1] = end
                box[2] = box[3] = begin
            box[0], box[1] = min(box[0], end), max(box[1], end)
            box[2], box[3] = min(box[2], begin), max(box[3], begin)
        last = max(last, box[1])
    return last


@compiled
def _pack_tiles(op: AttendOp, row: RowFields, unit: UnitFields, head: int, q: int) -> None:
    group = op.heads // op.kv_heads
    for t in range(unit.first, unit.last):
        to = q + (t - unit.first) * QUERIES * op.dim * 4
        for i in range(QUERIES):
            each = min(t * QUERIES + i, row.n * group - 1)
            _pack_one(op, row.first + each // group, head * group + each % group, i, to)


@compiled
def _pack(op: AttendOp, token: int, head: int, first: int, group: int, to: int) -> None:
    """One token's heads as a tile."""
    for i in range(QUERIES):
        _pack_one(op, token, head + min(first + i, group - 1), i, to)


@compiled
def _pack_one(op: AttendOp, token: int, head: int, i: int, to: int) -> None:
    """A scaled query among four: vectors of four numbers of each of them."""
    source = floats(op.q + token * op.q_row + head * op.q_head, op.dim)
    packed = floats(to + 16 * i, op.dim * QUERIES)
    for c in range(0, op.dim, 4):
        at = c * QUERIES
        for j in range(4):
            packed[at + j] = np.float32(source[c + j] * np.float32(op.scale))


@compiled
def _clear(op: AttendOp, states: int, tiles: int) -> None:
    """Nothing seen yet."""
    size = QUERIES * op.out_dim * 4 + STATE
    for t in range(tiles):
        floats(states + t * size, size // 4)[:] = np.float32(0)
        floats(states + t * size + QUERIES * op.out_dim * 4, LANES)[:] = np.float32(LOWEST)


@compiled
def _scan_piece(
    op: AttendOp, row: RowFields, number: int, head: int, tiles: int, first: int, end: int, q: int, scores: int,
    sight: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Blocks of a piece, for the tiles that see something of them."""
    k = integers(op.kv + 16 * number, 2)[0] + head * row.k_head
    v = integers(op.kv + 16 * number, 2)[1] + head * row.v_head
    for start in range(first, end, BLOCK):
        low, high = tiles, 0
        for t in range(tiles):
            box = integers(sight + SIGHT * t, 12)
            if box[1] > start and box[2] < start + BLOCK:
                low, high = min(low, t), t + 1
        if low >= high:
            continue
        count = min(BLOCK, end - start)
        here, there = k + start * row.k_row, v + start * row.v_row
        after = here + BLOCK * row.k_row if start + BLOCK < end else here
        _block(op, row, low, high, start, count, here, there, after, q, scores, sight, states, spare)


@compiled
def _block(
    op: AttendOp, row: RowFields, low: int, high: int, start: int, count: int, k: int, v: int, after: int, q: int,
    scores: int, sight: int, states: int, spare: int,
) -> None:  # fmt: skip
    """Tiles ``low`` to ``high`` over one block; values are fetched with the scores, the next keys with the values."""
    size, tile_size = BLOCK * QUERIES * 4, QUERIES * op.out_dim * 4 + STATE
    copied, k_row, v_row = count < BLOCK or op.kind != 0, row.k_row, row.v_row
    ahead = v
    if copied:
        _copy(op, k, k_row, op.dim, count, spare)
        k, k_row = spare, 4 * op.dim
    _scores(op, low, high, q, k, k_row, scores, ahead)
    for t in range(low, high):
        box = integers(sight + SIGHT * t, 12)
        weights, state = scores + t * size, states + t * tile_size + QUERIES * op.out_dim * 4
        _soften(op, weights, spare)
        if box[0] < start + BLOCK or box[3] > start:
            _hide_tile(op, sight, t, start, weights)
        weigh(weights, BLOCK, state)
    if copied:
        _copy(op, v, v_row, op.out_dim, count, spare)
        v, v_row = spare, 4 * op.out_dim
    pace = LANES * op.width // (high - low)
    for t in range(low, high):
        tile = states + t * tile_size
        _gather(op, scores + t * size, tile + QUERIES * op.out_dim * 4, v, v_row, tile, after, pace)
        after += pace * BLOCK * (op.out_dim // LANES)


@compiled
def _hide_tile(op: AttendOp, sight: int, t: int, start: int, weights: int) -> None:
    """No weight for what a query of the tile does not see."""
    seen = integers(sight + SIGHT * t, 12)
    for i in range(QUERIES):
        _hide(weights, i, seen[8 + i] - start, seen[4 + i] - start)


@compiled
def _hide(weights: int, i: int, low: int, high: int) -> None:
    """No weight for a query's keys before ``low`` and from ``high`` on."""
    tile = floats(weights, BLOCK * QUERIES)
    for key in range(BLOCK):
        if key < low or key >= high:
            tile[key // 4 * LANES + i * 4 + key % 4] = -np.inf


@compiled
def _soften(op: AttendOp, weights: int, spare: int) -> None:
    if op.softcap > 0:
        floats(spare, 1)[0] = np.float32(op.softcap * LOG2E)
        soften(weights, BLOCK * QUERIES // LANES, spare)


@compiled
def _scores(op: AttendOp, low: int, high: int, q: int, k: int, k_row: int, scores: int, ahead: int) -> None:
    size, tile, t = BLOCK * QUERIES * 4, QUERIES * op.dim * 4, low
    pace = LANES * op.width // ((high - low + TILES - 1) // TILES)
    share = pace * (BLOCK * op.dim // LANES)
    while t < high:
        if t + TILES <= high:
            score_tiles(q + t * tile, k, k_row, op.dim, BLOCK, scores + t * size, ahead, pace)
            t += TILES
        else:
            score(q + t * tile, k, k_row, op.dim, BLOCK, scores + t * size, ahead, pace)
            t += 1
        ahead += share


@compiled
def _gather(op: AttendOp, weights: int, state: int, v: int, v_row: int, out: int, ahead: int, pace: int) -> None:
    c = 0
    while c + VECTORS * LANES <= op.out_dim:
        gather_vectors(weights, state, v + 4 * c, v_row, op.out_dim, BLOCK, out + 4 * c, ahead, pace)
        ahead += pace * BLOCK * VECTORS
        c += VECTORS * LANES
    while c < op.out_dim:
        gather(weights, state, v + 4 * c, v_row, op.out_dim, BLOCK, out + 4 * c, ahead, pace)
        ahead += pace * BLOCK
        c += LANES


@compiled
def _copy(op: AttendOp, rows: int, row: int, dim: int, count: int, to: int) -> None:
    """``count`` rows as a whole block of floats, filled up with zeros."""
    for i in range(count):
        _row(op, rows + i * row, dim, to + 4 * i * dim)
    if count < BLOCK:
        floats(to + 4 * count * dim, (BLOCK - count) * dim)[:] = np.float32(0)


@compiled
def _take(op: AttendOp, tiles: int, first: int, count: int, to: int) -> None:
    """The states of some queries, as tiles of their own."""
    size = QUERIES * op.out_dim * 4 + STATE
    own = QUERIES * op.out_dim * 4
    for g in range(count):
        source, place = tiles + (first + g) // QUERIES * size, to + g // QUERIES * size
        a, b = (first + g) % QUERIES, g % QUERIES
        words(0, source + 4 * a * op.out_dim, op.out_dim // LANES, place + 4 * b * op.out_dim)
        mine, theirs = floats(place + own + 16 * b, LANES + 4), floats(source + own + 16 * a, LANES + 4)
        for c in range(4):
            mine[c], mine[LANES + c] = theirs[c], theirs[LANES + c]


@compiled
def _divide(op: AttendOp, tiles: int, g: int, token: int, head: int, spare: int) -> None:
    """A head's output: the weighted values over the sum of the weights, a sink's among them."""
    size = QUERIES * op.out_dim * 4 + STATE
    tile, i = tiles + g // QUERIES * size, g % QUERIES
    own = tile + QUERIES * op.out_dim * 4
    sums = floats(own + LINE + 16 * i, 4)
    total = np.float32(np.float32(sums[0] + sums[1]) + np.float32(sums[2] + sums[3]))
    if op.sinks:
        highest = floats(own + 16 * i, 1)[0]
        total += np.float32(2.0 ** (np.float64(floats(op.sinks + 4 * head, 1)[0]) * LOG2E - highest))
    source, to = floats(tile + 4 * i * op.out_dim, op.out_dim), floats(spare, op.out_dim)
    for c in range(op.out_dim):
        to[c] = np.float32(source[c] / total)
    width = 4 if op.out_kind == 0 else 2
    words(op.out_kind, spare, op.out_dim // LANES, op.out + token * op.out_row + head * op.out_dim * width)


@intrinsic
def join(typing: Any, running: Any, part: Any, vectors: Any) -> Code:
    """Bring a tile's next piece into what was joined of it: maxima, sums of weights, and outputs of ``vectors`` each."""

    def emit(e: Emitter, running: ir.Value, part: ir.Value, vectors: ir.Value) -> None:
        b = e.builder
        own = e.times(vectors, QUERIES * LINE)
        states = [e.at(tile, own) for tile in (running, part)]
        before, new = (e.load(state) for state in states)
        top = e.larger(before, new)
        factors = [e.exp2(b.fsub(each, top)) for each in (before, new)]
        sums = [e.load(e.at(state, LINE)) for state in states]
        e.store(top, states[0])
        e.store(e.fma(sums[0], factors[0], b.fmul(sums[1], factors[1])), e.at(states[0], LINE))
        for i in range(QUERIES):
            one, two = (
                e.everywhere(b.extract_element(factor, ir.Constant(ir.IntType(32), 4 * i))) for factor in factors
            )
            with e.loop(vectors) as c:
                at = e.at(e.times(vectors, i * LINE), e.times(c, LINE))
                here = b.add(running, at)
                e.store(e.fma(e.load(here), one, b.fmul(e.load(b.add(part, at)), two)), here)

    return intrinsic_code(3, emit)
