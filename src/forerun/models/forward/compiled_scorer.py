"""Run the forward pass of common decoders as one program, without Python between operations.

On a CPU, a pass over a few tokens should cost one read of the weights; in small models, Python between operations costs
as much again. So passes run as a program if the structure is supported (``architecture.py``) and the logits match the
model's own (``gate.py``). ``refresh`` detects changes; if no program fits any more, the model runs its own code.
Kernels sum in a fixed order, so a token's logits have the same bits whatever shares its pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import le

import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels import gpu
from forerun.kernels.attention.packed_pass import PackedPass, TopkTables
from forerun.kernels.runtime.addresses import head_rows
from forerun.kernels.runtime.vector_ir import LINE
from forerun.kv.cache import READ_BLOCK, Addresses, Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import known
from forerun.models.forward.compiled_forward import CompiledForward, Decoder, PassKind, PassSize
from forerun.models.forward.scorer import PassResult, Scorer, is_sharded

SPARE_SCRATCH_BYTES = 4096


class CompiledScorer(Scorer):
    """A scorer that runs a program of kernels over a supported model's weights; see ``fastest_scorer``."""

    def __init__(self, model: PreTrainedModel, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(model, kv_dtype)
        self._slots = self._states = torch.empty(0, dtype=torch.uint8)
        self._read_model()

    def _read_model(self) -> None:
        super()._read_model()
        self._held = [weight.detach() for weight in self.model.parameters()]
        """Kept alive because programs have their addresses: weights moved during a request must not be freed."""
        self._decoder = Decoder(self.model, self.kv_dtype) if known(self.model) else None
        self._compiled: dict[PassKind, CompiledForward] = {}
        self._embedded = self.vocabulary

    def reads_whole(self, cache: Cache) -> bool:
        return self._decoder is not None and cache.full is not None and cache.full.offloaded

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        with self._lock:
            result = None if self._decoder is None else self._score(self._decoder, blocks, caches, layers)
        return super()._pass(blocks, caches, layers) if result is None else result

    def _score(
        self, decoder: Decoder, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]
    ) -> PassResult | None:
        """Return all rows' logits and states; None if a program cannot read some caches."""
        rows: list[Addresses] = []
        for cache, block in zip(caches, blocks, strict=True):
            row = cache.addressed(decoder.attending, decoder.like, block.count)
            if row is None:
                full = [each.full for each in caches if each.full is not None]
                offloaded = len(full) == len(caches) and any(each.offloaded for each in full)
                by_layers = offloaded and not decoder.convolutions
                return self._run_by_layers(decoder, blocks, full, layers) if by_layers else None
            if rows and (row.topk is None) != (rows[0].topk is None):
                return None
            rows.append(row)
        return self._run(decoder, blocks, caches, rows, layers)

    def _run(
        self,
        decoder: Decoder,
        blocks: Sequence[Block],
        caches: Sequence[Cache],
        rows: Sequence[Addresses],
        layers: tuple[int, ...],
    ) -> PassResult:
        places, positions = [row.place for row in rows], [row.position for row in rows]
        packed = PackedPass(blocks, decoder.heads, torch.get_num_threads(), places, positions)
        tables = [row.topk for row in rows if row.topk is not None]
        topk = TopkTables(packed, tables) if tables else None
        keeps = self.queries_from is not None and topk is None and any(map(self.keeps_queries, blocks, caches))
        kind = PassKind(packed.threads, keeps, topk is not None, layers)
        compiled, memory = self._prepare(decoder, packed, kind, topk)
        for number, row in enumerate(rows):
            compiled.kv[:, number] = row.layers
        for place, (layer, part) in enumerate(decoder.convolutions.items()):
            before = part.taps.weight.shape[2] - 1
            compiled.histories[place, : len(blocks)] = [
                cache.recurrent().history(layer, before, decoder.inputs, block)
                for cache, block in zip(caches, blocks, strict=True)
            ]
        if topk is not None:
            topk.fill(compiled.topk, self._states.data_ptr())
        logits = torch.empty(packed.outputs, decoder.head.count, dtype=torch.float32)
        fields = packed.fields([row.strides for row in rows], topk)
        compiled.program.run(packed.threads, y=logits.data_ptr(), **memory, **fields)
        self._hand_over_queries(decoder, compiled, packed, caches, keeps)
        logits = decoder.finished(logits) if decoder.scales_logits else logits
        return PassResult(logits, compiled.states[: packed.n].clone() if layers else None)

    def _run_by_layers(
        self, decoder: Decoder, blocks: Sequence[Block], caches: Sequence[FullCache], states_of: tuple[int, ...]
    ) -> PassResult:
        """Run layer by layer, because keys and values are partly off the device (TriForce, section 5.3): during a
        layer, the next one's are fetched and the previous one's written back. All pieces of a prompt pass a layer
        before the next, so keys and values are written back once, and none is fetched before decoding."""
        pieces, keeps = _pieces(decoder, blocks, len(states_of)), self.queries_from is not None
        kind = PassKind(pieces[0].packed.threads, keeps, states=states_of)
        for piece in pieces:  # the largest decides
            compiled, memory = self._prepare(decoder, piece.packed, kind)
        run = partial(_run_stage, compiled, memory)
        counts = [len(block) for block in blocks]
        for cache, count in zip(caches, counts, strict=True):
            cache.addressed(decoder.attending, decoder.like, count)  # makes room
            cache.begin_pass(decoder.specs)
        for piece in pieces:
            run(0, piece)
        for layer in decoder.attending:
            rows = [cache.fetch_layer(layer, count) for cache, count in zip(caches, counts, strict=True)]
            for piece in pieces:
                own = [rows[row] for row in piece.rows]
                compiled.kv[layer, : len(own)] = [[keys.data_ptr(), values.data_ptr()] for keys, values in own]
                strides = [(*head_rows(keys)[1:], *head_rows(values)[1:]) for keys, values in own]
                run(1 + layer, piece, strides)
                if keeps:
                    queries = _queries(decoder, compiled.qkv[layer % len(compiled.qkv)], piece.packed.counts)
                    for row, each, block in zip(piece.rows, queries, piece.packed.blocks, strict=True):
                        caches[row].record_queries([layer], each[None], block)
            for cache, count in zip(caches, counts, strict=True):
                cache.write_back(layer, count)
        found: dict[int, torch.Tensor] = {}
        for piece in pieces:
            if any(piece.ends):
                logits = torch.empty(piece.packed.outputs, decoder.head.count, dtype=torch.float32)
                run(-1, piece, y=logits.data_ptr())
                split = torch.split(decoder.finished(logits), [len(block.tree) + 1 for block in piece.packed.blocks])
                found |= {row: t for row, t, ends in zip(piece.rows, split, piece.ends, strict=True) if ends}
        logits = torch.cat([found[row] for row in range(len(blocks))])
        return PassResult(logits, _states_by_row(pieces, len(blocks)) if states_of else None)

    def _prepare(
        self, decoder: Decoder, packed: PackedPass, kind: PassKind, topk: TopkTables | None = None
    ) -> tuple[CompiledForward, dict[str, int]]:
        """Return a program for this pass and its memory's ``PassFields``; raise ``IndexError`` for an unknown token."""
        (least, most, last), work = packed.bounds, packed if topk is None else topk
        if least < 0 or most >= self._embedded:
            wrong = least if least < 0 else most
            raise IndexError(f"token {wrong} is not in the vocabulary of {self._embedded} tokens")
        size = PassSize(packed.n, len(packed.blocks), packed.most_tiles, packed.longest, last + 1)
        compiled = self._compiled.get(kind)
        if compiled is None or not all(map(le, size, compiled.size)):
            compiled = self._make(decoder, kind, size)
        threads, slot = kind.threads, compiled.slot_size if topk is None else max(compiled.slot_size, topk.slot_size)
        slot += SPARE_SCRATCH_BYTES
        if self._slots.nbytes < threads * slot:
            self._slots = torch.empty(threads * slot, dtype=torch.uint8)
        if self._states.nbytes < work.states_bytes:
            self._states = torch.empty(work.states_bytes + work.states_bytes // 4, dtype=torch.uint8)
        size_of_slot = self._slots.nbytes // threads // LINE * LINE
        addresses = {"states": self._states.data_ptr(), "slots": self._slots.data_ptr(), "slot_size": size_of_slot}
        return compiled, addresses

    def _make(self, decoder: Decoder, kind: PassKind, size: PassSize) -> CompiledForward:
        """Make a program for passes of this size and up to that of the kind's last one, with some room."""
        before = self._compiled.get(kind)
        self._compiled = {each: own for each, own in self._compiled.items() if each.threads == kind.threads}
        if decoder.positions < size.positions:
            decoder.grow_angles(size.positions)
            self._compiled = {}  # their addresses are those of the smaller table
        if before is not None:
            size = PassSize(*map(max, size, before.size))
        made = self._compiled[kind] = CompiledForward(
            decoder, kind, size.rounded()._replace(positions=decoder.positions)
        )
        return made

    def _hand_over_queries(
        self, decoder: Decoder, compiled: CompiledForward, packed: PackedPass, caches: Sequence[Cache], kept: bool
    ) -> None:
        specs, first = decoder.specs, 0
        for cache, block, count in zip(caches, packed.blocks, packed.counts, strict=True):
            if (full := cache.full) is not None and (kept or full.queries or full.specs is not specs):
                full.begin_pass(specs)
                if kept and self.keeps_queries(block, full):
                    (queries,) = _queries(decoder, compiled.qkv[:, first : first + count], [count])
                    full.record_queries(decoder.attending, queries, block)
            first += count


@dataclass
class _RowSlice:
    """Some rows' blocks, or pieces of them, that pass a layer at once.

    ``rows``: indices in the pass. ``ends``: whether each block ends here and needs logits. ``states``: requested hidden
    states so far, float32 ``[n, layers * hidden]``.
    """

    rows: list[int]
    packed: PackedPass
    ends: list[bool]
    x: torch.Tensor
    states: torch.Tensor


def _run_stage(
    compiled: CompiledForward,
    memory: Mapping[str, int],
    stage: int,
    piece: _RowSlice,
    strides: Sequence[tuple[int, int, int, int]] = (),
    y: int = 0,
) -> None:
    compiled.x[: piece.packed.n] = piece.x
    compiled.stages[stage].run(piece.packed.threads, y=y, **memory, **piece.packed.fields(strides))
    piece.x[:] = compiled.x[: piece.packed.n]
    for columns in compiled.states_by_stage.get(stage, ()):
        piece.states[:, columns] = compiled.states[: piece.packed.n, columns]


def _pieces(decoder: Decoder, blocks: Sequence[Block], states: int) -> list[_RowSlice]:
    """Cut long blocks into pieces of up to ``READ_BLOCK`` pending tokens; the tree is in the last one."""
    cut = [
        [
            range(first, min(first + READ_BLOCK, len(block.pending)))
            for first in range(0, len(block.pending), READ_BLOCK)
        ]
        for block in blocks
    ]
    pieces, threads = [], torch.get_num_threads()
    for turn in range(max(map(len, cut))):
        rows = [row for row, own in enumerate(cut) if turn < len(own)]
        ends = [turn + 1 == len(cut[row]) for row in rows]
        parts = []
        for row, end in zip(rows, ends, strict=True):
            block, own = blocks[row], cut[row][turn]
            tree = block.tree if end else DraftTree.empty()
            parts.append(Block(block.pending[own.start : own.stop], tree, block.start + own.start))
        packed = PackedPass(parts, decoder.heads, threads)
        memory = (torch.zeros(packed.n, count * decoder.hidden) for count in (1, states))
        pieces.append(_RowSlice(rows, packed, ends, *memory))
    return pieces


def _states_by_row(pieces: Sequence[_RowSlice], rows: int) -> torch.Tensor:
    parts: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for piece in pieces:
        for row, states in zip(piece.rows, torch.split(piece.states, piece.packed.counts), strict=True):
            parts[row].append(states)
    return torch.cat([part for own in parts for part in own])


def _queries(decoder: Decoder, qkv: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return each row's queries ``[..., H, n, d]`` from ``[..., tokens, width]``."""
    heads, n = decoder.heads, sum(counts)
    queries = qkv[..., :n, : heads.heads * heads.dim]
    parted = queries.view(*queries.shape[:-1], heads.heads, heads.dim).transpose(-3, -2)
    return torch.split(parted, list(counts), -2)


def fastest_scorer(scorer: Scorer) -> Scorer:
    """Return a ``CompiledScorer`` for a supported structure, a ``GpuScorer`` on a GPU, else ``scorer``."""
    unsharded = type(scorer) is Scorer and not is_sharded(scorer.model)
    if unsharded and gpu.runs_on(scorer.device):
        from forerun.models.forward.gpu_scorer import GpuScorer  # needs Triton

        return GpuScorer(scorer.model)
    return CompiledScorer(scorer.model, scorer.kv_dtype) if unsharded and known(scorer.model) else scorer
