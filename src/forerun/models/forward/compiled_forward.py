"""Build a model's forward pass as a list of kernel operations, over buffers of a fixed size.

Weights are read in place. Activations are float32; a linear layer's input has the weights' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.tree import IntArray
from forerun.kernels.attention.attention_fields import AttendOp
from forerun.kernels.attention.ordered_attention import COMBINE, SCAN
from forerun.kernels.attention.packed_pass import HeadShape, scratch_bytes
from forerun.kernels.attention.topk_attention import ATTEND_TOPK
from forerun.kernels.attention.topk_rank import PROJECT_QUERIES, RANK_CHUNKS, TOPK_BYTES
from forerun.kernels.linear import linear
from forerun.kernels.linear.decoder_ops import (
    EMBED,
    LOOKUP,
    NORM,
    ROTARY,
    SCALED_ROWS,
    EmbedOp,
    LookupOp,
    NormOp,
    RotaryOp,
    ScaledRowsOp,
)
from forerun.kernels.linear.linear_op import ADD, GATE, PUT
from forerun.kernels.linear.ordered_modules import filled
from forerun.kernels.linear.panels import format_number, format_of
from forerun.kernels.linear.rowwise import TO_FLOATS, TO_SUM, TO_WORDS
from forerun.kernels.linear.weight_matrix import table_of, unpack_code
from forerun.kernels.recurrent import short_convolution
from forerun.kernels.recurrent.short_convolution import GATED_CONVOLUTION, GatedConvolutionOp
from forerun.kernels.runtime.executor import Operation, Program
from forerun.models.forward.architecture import (
    PROGRAM_DTYPES,
    AttentionPart,
    ConvolutionPart,
    DecoderLayer,
    MatrixRows,
    angles,
    as_stored,
    describe,
    eps,
    weight_offset,
)

LEAST_CAPACITY = 16
"""Tokens and rows of the smallest program. Making one costs at most as much as a pass over one token (0.9 ms for the
bundled model, 5 for SmolLM2), so it should be rare. Unused memory is some hundred kilobytes."""
ANGLES_GROWTH = 4096

Op = tuple[Operation, Any]


class PassKind(NamedTuple):
    """What distinguishes programs, besides their size: whether they keep every layer's queries; whether queries choose
    keys (``topk_rank.py``); and the layers whose hidden states are kept until the next pass (``Scorer.score_rows``)."""

    threads: int
    keeps_queries: bool = False
    topk: bool = False
    states: tuple[int, ...] = ()


class PassSize(NamedTuple):
    """The memory that a pass needs: tokens; rows of its batch; most tiles of queries in a unit; model positions."""

    tokens: int
    rows: int
    tiles: int
    places: int
    positions: int

    def rounded(self) -> PassSize:
        """Return the next powers of two, and at least ``LEAST_CAPACITY``; positions stay."""
        return PassSize(*(max(LEAST_CAPACITY, 1 << (n - 1).bit_length()) for n in self))._replace(
            positions=self.positions
        )


class Decoder:
    """What a model's programs of all sizes share; ``architecture.known`` must hold for the model."""

    def __init__(self, model: PreTrainedModel, kv_dtype: torch.dtype | None = None) -> None:
        self.parts = parts = describe(model)
        self.layers, self.attention, self.convolutions = parts.layers, parts.attention, parts.convolutions
        self.attending = list(self.attention)
        self.specs = {number: part.spec for number, part in self.attention.items()}
        self.head = MatrixRows(parts.head, 0, parts.head.out_features)
        self.kind, self.width = PROGRAM_DTYPES[parts.dtype], int(parts.dtype.itemsize)
        self.hidden = int(parts.embedding.embedding_dim)
        first = next(iter(self.attention.values()))
        dim, (queries, keys, _) = first.head_dim, first.qkv
        self.heads = HeadShape(queries.count // dim, keys.count // dim, dim, dim)
        self.like = torch.empty(1, self.heads.kv_heads, 0, dim, dtype=kv_dtype or parts.dtype)
        """Empty keys; see ``Cache.addressed``."""
        self.kv_kind = PROGRAM_DTYPES[self.like.dtype]
        self.inner = self.layers[0].down.module.in_features
        self.inputs = torch.empty(0, self.hidden, dtype=torch.float32)
        """Empty inputs of convolutions; see ``RecurrentStates.history``."""
        self.scales_logits = parts.logits_scaling != 1.0 or parts.logits_softcap is not None
        self.positions = 0
        longest = max(self.hidden, self.inner, self.heads.heads * self.heads.dim)
        self._words = longest if as_stored(self.head.module) else longest * self.width // 4
        taps = max((part.taps.weight.shape[2] for part in self.convolutions.values()), default=0)
        self._convolution_bytes = short_convolution.scratch_bytes(taps)

    def scratch_bytes(self, size: PassSize) -> int:
        """Return the scratch bytes per thread for a pass of this size."""
        attention = scratch_bytes(self.heads, size.tiles, size.places)
        return max(linear.scratch_bytes(size.tokens, self._words), attention, self._convolution_bytes)

    def grow_angles(self, count: int) -> None:
        """Compute angles for at least ``count`` positions."""
        goal = count + max(ANGLES_GROWTH, count // 4)
        self.positions = goal if self.parts.limit is None else max(count, min(goal, self.parts.limit))
        kinds = {part.rotary for part in self.attention.values()}
        self.angles = {kind: angles(self.parts.rotary, kind, self.positions, self.parts.limit) for kind in kinds}

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the head's scaling and soft cap to float32 logits, in place."""
        scaling, softcap = self.parts.logits_scaling, self.parts.logits_softcap
        if scaling != 1.0:
            logits.div_(scaling)
        if softcap is not None:
            logits = filled(torch.tanh, logits.div_(softcap)).mul_(softcap)
        return logits


class CompiledForward:
    """The program and its buffers.

    Attributes:
        size: the largest pass that fits its memory; ``slot_size``: its scratch bytes per thread.
        kv: addresses of keys and values in each row's cache, per layer with attention, int64 ``[layers, rows, 2]``.
        topk: ``TopkFields`` per such layer and row, int64 ``[layers, rows, ...]``.
        qkv: queries, keys and values side by side, ``[layers or 1, tokens, width]``.
        histories: addresses of the inputs in each row's cache, per convolution, int64 ``[layers, rows]``.
        states: hidden states of the kind's layers, side by side, ``[tokens, layers * hidden]``.
        states_by_stage: their columns, by the stage that writes them.
    """

    def __init__(self, decoder: Decoder, kind: PassKind, size: PassSize) -> None:
        self.size, self._kind, self._decoder = size, kind, decoder
        self.slot_size = decoder.scratch_bytes(size)
        heads, n, count = decoder.heads, size.tokens, len(decoder.attention)
        width = (heads.heads + 2 * heads.kv_heads) * heads.dim
        self.x, self._output = (torch.zeros(n, decoder.hidden, dtype=torch.float32) for _ in range(2))
        self._input = torch.zeros(n, max(decoder.hidden, heads.heads * heads.dim), dtype=decoder.parts.dtype)
        self._gated = torch.zeros(n, decoder.inner, dtype=decoder.parts.dtype)
        self.qkv = torch.zeros(count if kind.keeps_queries else 1, n, width, dtype=torch.float32)
        self.kv = np.zeros((count, size.rows, 2), np.int64)
        self.topk = np.zeros((count, size.rows, TOPK_BYTES // 8), np.int64)
        self.histories = np.zeros((len(decoder.convolutions), size.rows), np.int64)
        gated = 3 * decoder.hidden if decoder.convolutions else 0
        self._gates = torch.zeros(n, gated, dtype=torch.float32)  # two gates and an input of a convolution
        self.states = torch.zeros(n, len(kind.states) * decoder.hidden, dtype=torch.float32)
        self.states_by_stage: dict[int, list[slice]] = {}
        self._tables: list[IntArray] = []
        last = self._norm(decoder.parts.norm, _rows(self.x), TO_WORDS, _rows(self._input), which=1)
        logits = (0, decoder.head.count * 4)
        self._stages: list[list[Op]] = [
            [self._embed(), *self._keep_states(0)],
            *(
                [*self._mixer(number, layer), *self._mlp(layer), *self._keep_states(number + 1)]
                for number, layer in enumerate(decoder.layers)
            ),
            [last, self._linear([decoder.head], self._input, PUT, logits, which=1)],
        ]

    @cached_property
    def program(self) -> Program:
        """The complete pass."""
        return Program([op for stage in self._stages for op in stage])

    @cached_property
    def stages(self) -> list[Program]:
        """The pass in parts: the embedding, each layer, and the head."""
        return [Program(stage) for stage in self._stages]

    def _embed(self) -> Op:
        decoder, x = self._decoder, _rows(self.x)
        embedding, factor = decoder.parts.embedding, decoder.parts.embedding_factor
        if as_stored(embedding):
            which, rows = format_number(embedding.kind), embedding.weight
            fields = (*_rows(rows), format_of(which).words, unpack_code(which), decoder.hidden)
            return LOOKUP, LookupOp(*fields, *x, factor)
        return EMBED, EmbedOp(decoder.kind, *_rows(embedding.weight), decoder.hidden, *x, factor)

    def _keep_states(self, stage: int) -> list[Op]:
        """Copy the residual stream after a stage for requested layers; after the last layer, normed."""
        decoder, x, size, ops = self._decoder, _rows(self.x), self._decoder.hidden, list[Op]()
        for place, layer in enumerate(self._kind.states):
            if layer == stage:
                columns = slice(place * size, (place + 1) * size)
                self.states_by_stage.setdefault(stage, []).append(columns)
                to = _rows(self.states[:, columns])
                if stage == len(decoder.layers):
                    ops.append(self._norm(decoder.parts.norm, x, TO_FLOATS, to))
                else:
                    ops.append((SCALED_ROWS, ScaledRowsOp(0, TO_WORDS, *x, size, *to, 1.0)))
        return ops

    def _mixer(self, number: int, layer: DecoderLayer) -> list[Op]:
        part = layer.mixer
        mixed = self._attention(number, part) if isinstance(part, AttentionPart) else self._convolution(number, part)
        return [self._read(layer.before_mixer), *mixed, *self._add(layer, part.output, self._input, layer.after_mixer)]

    def _convolution(self, number: int, part: ConvolutionPart) -> list[Op]:
        decoder, taps = self._decoder, part.taps
        place = list(decoder.convolutions).index(number)
        op = GatedConvolutionOp(
            decoder.kind, *_rows(self._gates), decoder.hidden, taps.weight.shape[2], taps.weight.data_ptr(),
            0 if taps.bias is None else taps.bias.data_ptr(), self.histories[place].ctypes.data, *_rows(self._input),
        )  # fmt: skip
        return [self._linear([part.inputs], self._input, PUT, _rows(self._gates)), (GATED_CONVOLUTION, op)]

    def _attention(self, number: int, part: AttentionPart) -> list[Op]:
        place = self._decoder.attending.index(number)
        qkv, kv = self.qkv[place % len(self.qkv)], self.kv[place].ctypes.data
        return [
            self._linear(part.qkv, self._input, PUT, _rows(qkv)),
            *self._rotate(part, qkv, kv),
            *self._attend(place, part, qkv, kv),
        ]

    def _attend(self, place: int, part: AttentionPart, qkv: torch.Tensor, kv: int) -> list[Op]:
        decoder, heads, spec = self._decoder, self._decoder.heads, part.spec
        topk = self.topk[place].ctypes.data if self._kind.topk else 0
        op = AttendOp(
            decoder.kv_kind, decoder.like.element_size(), heads.heads, heads.kv_heads, heads.dim, heads.out_dim,
            spec.window or 0, *_rows(qkv), heads.dim * 4, kv, 0, *_rows(self._input), decoder.kind,
            spec.scaling / math.log(2), spec.softcap or 0.0, topk,
        )  # fmt: skip
        kinds = (PROJECT_QUERIES, RANK_CHUNKS, ATTEND_TOPK) if topk else (SCAN, COMBINE)
        return [(kind, op) for kind in kinds]

    def _rotate(self, part: AttentionPart, qkv: torch.Tensor, kv: int) -> list[Op]:
        decoder, heads = self._decoder, self._decoder.heads
        norms, (y, row) = (part.q_norm, part.k_norm), _rows(qkv)
        per_head = [norm is not None and len(norm.weight) == heads.dim for norm in norms]
        places = (y, row), (y + 4 * heads.heads * heads.dim, row)
        products = [
            self._norm(norm, place, TO_FLOATS, place)
            for norm, place, single in zip(norms, places, per_head, strict=True)
            if norm is not None and not single
        ]
        q_norm, k_norm = (norm.weight.data_ptr() if own else 0 for norm, own in zip(norms, per_head, strict=True))
        own = next((norm for norm, single in zip(norms, per_head, strict=True) if single), None)
        offset, least = (0, 0.0) if own is None else (weight_offset(own), eps(own))
        cos, sin = decoder.angles[part.rotary]
        op = RotaryOp(
            decoder.kind, decoder.kv_kind, heads.heads, heads.kv_heads, heads.dim, y, row, q_norm, k_norm, offset,
            cos.data_ptr(), sin.data_ptr(), cos.shape[1] if part.rotates else 0, kv, least,
        )  # fmt: skip
        return [*products, (ROTARY, op)]

    def _mlp(self, layer: DecoderLayer) -> list[Op]:
        return [
            self._read(layer.before_mlp),
            self._linear(layer.gate_up, self._input, GATE, _rows(self._gated)),
            *self._add(layer, layer.down, self._gated, layer.after_mlp),
        ]

    def _read(self, norm: Any) -> Op:
        if norm is not None:
            return self._norm(norm, _rows(self.x), TO_WORDS, _rows(self._input))
        decoder = self._decoder
        rows = (*_rows(self.x), decoder.hidden, *_rows(self._input))
        return SCALED_ROWS, ScaledRowsOp(decoder.kind, TO_WORDS, *rows, 1.0)

    def _add(self, layer: DecoderLayer, matrix: MatrixRows, x: torch.Tensor, norm: Any) -> list[Op]:
        """Apply a part's last linear layer, and add the result, normed or multiplied, to the residual stream."""
        if norm is None and layer.residual_multiplier == 1.0:
            return [self._linear([matrix], x, ADD, _rows(self.x))]
        put = self._linear([matrix], x, PUT, _rows(self._output))
        if norm is not None:
            return [put, self._norm(norm, _rows(self._output), TO_SUM, _rows(self.x))]
        rows = (*_rows(self._output), self._decoder.hidden, *_rows(self.x))
        return [put, (SCALED_ROWS, ScaledRowsOp(self._decoder.kind, TO_SUM, *rows, layer.residual_multiplier))]

    def _norm(self, norm: Any, x: tuple[int, int], mode: int, to: tuple[int, int], which: int = 0) -> Op:
        weight = norm.weight
        rows = (*x, weight.data_ptr(), len(weight), *to)
        return NORM, NormOp(which, self._decoder.kind, mode, weight_offset(norm), *rows, eps(norm))

    def _linear(
        self, matrices: Sequence[MatrixRows], x: torch.Tensor, mode: int, y: tuple[int, int], which: int = 0
    ) -> Op:
        decoder, columns = self._decoder, matrices[0].module.in_features
        table = table_of([each.weights for each in matrices])
        self._tables.append(table)  # keeps alive what the program addresses
        words = columns if as_stored(matrices[0].module) else columns * decoder.width // 4
        to_kind, threads = decoder.kind if mode == GATE else 0, self._kind.threads
        options = {"mode": mode, "to_kind": to_kind, "which": which, "activation": decoder.parts.activation}
        return linear.operation(table, decoder.kind, words, _rows(x), y, threads, **options)


def _rows(t: torch.Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.stride(0) * t.element_size()
