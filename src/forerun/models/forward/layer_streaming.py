"""A pass that goes layer by layer, because keys and values are not all on the device (TriForce, section 5.3).

While a layer is computed, the next layer's keys and values come, and the new ones of the layer before go. A long prompt
goes through a layer block by block before it goes through the next one. So its keys and values are brought away once,
and none of them has to come back before the first token is generated. The operations are those of
``compiled_forward.py``, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import Rows
from forerun.kernels.attention.packed_pass import PackedPass, address
from forerun.kernels.runtime.addresses import head_rows
from forerun.kv.cache import READ_BLOCK
from forerun.kv.full_cache import FullCache
from forerun.kv.offloaded import OffloadedCache
from forerun.models.forward.compiled_forward import CompiledForward, Decoder


class Runner(Protocol):
    """A ``CompiledScorer``."""

    keeps_queries: bool

    def prepare(self, decoder: Decoder, packed: PackedPass) -> CompiledForward:
        """A program with memory for a pass."""

    def fields(self, packed: PackedPass, rows: bytearray) -> dict[str, int]:
        """A program's fields for a pass."""


@dataclass
class _RowSlice:
    """Some rows' blocks, or pieces of them, that go through a layer at once.

    Attributes:
        rows: indices of the pass's rows.
        packed: their blocks.
        ends: whether each row's block ends here, so that its logits are wanted.
        x: what goes to the next layer, float32 ``[n, hidden]``.
    """

    rows: list[int]
    packed: PackedPass
    ends: list[bool]
    x: torch.Tensor


def run_by_layers(
    runner: Runner, decoder: Decoder, blocks: Sequence[Block], caches: Sequence[FullCache]
) -> torch.Tensor:
    """A pass over all rows; some of the caches are offloaded.

    Returns:
        Logits as from ``CompiledScorer._run``, float32: of each row's last pending token and its tree's nodes.
    """
    cut = _cut(decoder, blocks)
    for part in cut:  # the largest decides
        compiled = runner.prepare(decoder, part.packed)
    for part in cut:
        compiled.stages[0].run(**runner.fields(part.packed, bytearray(8)))
        part.x[:] = compiled.x[: part.packed.n]
    counts = [len(block) for block in blocks]
    for layer in range(len(decoder.layers)):
        rows = [_enter(cache, layer, count, decoder) for cache, count in zip(caches, counts, strict=True)]
        for part in cut:
            _through(runner, compiled, part, layer, [rows[row] for row in part.rows], decoder)
            if runner.keeps_queries:
                _ask(compiled, part, layer, caches, decoder)
        for cache, count in zip(caches, counts, strict=True):
            if isinstance(cache, OffloadedCache):
                cache.write_back(layer, count)
    specs = {number: layer.spec for number, layer in enumerate(decoder.layers)}
    for cache in caches:
        cache.specs = dict(specs)
    found: dict[int, torch.Tensor] = {}
    for part in cut:
        found |= _logits(runner, compiled, part, decoder)
    return torch.cat([found[row] for row in range(len(blocks))])


def _cut(decoder: Decoder, blocks: Sequence[Block]) -> list[_RowSlice]:
    """Cut long blocks into pieces of at most ``READ_BLOCK`` pending tokens. The tree comes with the last one."""
    pieces = [_pieces(block) for block in blocks]
    cut = []
    for turn in range(max(map(len, pieces))):
        rows = [row for row, own in enumerate(pieces) if turn < len(own)]
        packed = PackedPass([pieces[row][turn] for row in rows], decoder.heads, torch.get_num_threads())
        ends = [turn + 1 == len(pieces[row]) for row in rows]
        cut.append(_RowSlice(rows, packed, ends, torch.empty(packed.n, decoder.hidden)))
    return cut


def _pieces(block: Block) -> list[Block]:
    count, pieces = len(block.pending), []
    for first in range(0, count, READ_BLOCK):
        last = min(first + READ_BLOCK, count)
        tree = block.tree if last == count else DraftTree.empty()
        pieces.append(Block(block.pending[first:last], tree, block.start + first))
    return pieces


def _enter(cache: FullCache, layer: int, count: int, decoder: Decoder) -> Rows:
    if isinstance(cache, OffloadedCache):
        return cache.fetch_layer(layer, count)
    store = cache.reserve(len(decoder.layers), decoder.like, count)
    return store[layer, 0][None], store[layer, 1][None]


def _through(
    runner: Runner, compiled: CompiledForward, part: _RowSlice, layer: int, rows: Sequence[Rows], decoder: Decoder
) -> None:
    """One layer."""
    strides = []
    for row, (keys, values) in enumerate(rows):
        compiled.kv[layer, row] = keys.data_ptr(), values.data_ptr()
        strides.append((*head_rows(keys)[1:], *head_rows(values)[1:]))
    table = part.packed.rows(strides)
    compiled.x[: part.packed.n] = part.x
    compiled.stages[1 + layer].run(**runner.fields(part.packed, table))
    part.x[:] = compiled.x[: part.packed.n]


def _ask(compiled: CompiledForward, part: _RowSlice, layer: int, caches: Sequence[FullCache], decoder: Decoder) -> None:
    """Give full caches the layer's queries."""
    heads, first = decoder.heads, 0
    mixed = compiled.qkv[layer % len(compiled.qkv)]
    for row, count in zip(part.rows, part.packed.counts, strict=True):
        turned = mixed[first : first + count, : heads.heads * heads.dim].clone()
        caches[row].record_queries(layer, turned.view(count, heads.heads, heads.dim).transpose(0, 1)[None])
        first += count


def _logits(runner: Runner, compiled: CompiledForward, part: _RowSlice, decoder: Decoder) -> dict[int, torch.Tensor]:
    """Logits of the rows whose blocks end in this part."""
    if not any(part.ends):
        return {}
    wanted = part.packed.output_indices
    y = torch.empty(len(wanted), decoder.head.count, dtype=torch.float32)
    compiled.x[: part.packed.n] = part.x
    outputs = {"outputs": len(wanted), "output_indices": address(wanted), "y": y.data_ptr()}
    compiled.stages[-1].run(**runner.fields(part.packed, bytearray(8)) | outputs)
    sizes = [len(block.tree) + 1 for block in part.packed.blocks]
    split = torch.split(decoder.finished(y), sizes)
    return {row: t for row, t, ends in zip(part.rows, split, part.ends, strict=True) if ends}
