"""A model's forward pass as a list of kernel operations, over buffers of a fixed size.

Weights are read where the model stores them. Activations are float32; a linear layer's input has the weights' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.kernels.attention.ordered_attention import ATTEND, AttendOp
from forerun.kernels.attention.topk_rank import SOUGHT_BYTES, SOUGHT_OP, SoughtOp
from forerun.kernels.linear import blockwise, linear
from forerun.kernels.linear.decoder_ops import EMBED, NORM, ROTARY, EmbedOp, NormOp, RotaryOp
from forerun.kernels.linear.linear import ADD, GATE, LINEAR, PUT, LinearOp
from forerun.kernels.linear.rowwise import TO_SUM, TO_WORDS
from forerun.kernels.quantized import stored_linear
from forerun.kernels.quantized.stored_linear import LOOKUP
from forerun.kernels.runtime import executor
from forerun.models.forward.architecture import (
    ACTIVATIONS,
    KINDS,
    Layer,
    activation,
    angles,
    embed_scale,
    eps,
    layers,
    one,
)
from forerun.models.forward.packing import Heads
from forerun.models.loading.stored_weights import StoredEmbedding, StoredLinear

SHARES = 8
"""A matrix is cut into this many pieces of work per thread."""
TABLE = 4096
"""The table of angles grows by at least this many positions."""

Op = tuple[Any, Any]


@dataclass(frozen=True)
class Size:
    """The largest pass that a program has room for.

    Attributes:
        tokens: of a pass.
        rows: of a batch.
        threads: number of threads for which the work is cut.
        keeps: whether every layer's queries are kept until the next pass.
        chooses: whether queries choose what they see (``kernels/sought.py``).
    """

    tokens: int
    rows: int
    threads: int
    keeps: bool
    chooses: bool = False

    def holds(self, other: Size) -> bool:
        """Whether a pass of the other size fits."""
        enough = self.tokens >= other.tokens and self.rows >= other.rows
        alike = self.keeps == other.keeps and self.chooses == other.chooses
        return enough and alike and self.threads == other.threads


class Parts:
    """The parts of a model that stay the same when the program is rewritten for more tokens.

    Args:
        model: one that ``parts.known`` knows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.model
        self.layers = layers(model)
        self.embedding: Any = model.get_input_embeddings()
        self.norm, self.head = decoder.norm, model.lm_head
        self.dtype = model.dtype
        self.kind, self.width = KINDS[model.dtype], int(model.dtype.itemsize)
        self.activation = ACTIVATIONS[activation(model.config)]
        self.hidden = int(self.embedding.embedding_dim)
        first = self.layers[0].attention
        dim = first.head_dim
        self.heads = Heads(first.q_proj.out_features // dim, first.k_proj.out_features // dim, dim, dim)
        self.like = torch.empty(1, self.heads.kv_heads, 0, dim, dtype=self.dtype)
        """Keys of no token; see ``Cache.addressed``."""
        self.inner = int(self.layers[0].mlp.gate_proj.out_features)
        self._rotary = decoder.rotary_emb
        self.positions = 0

    def room(self, tokens: int) -> int:
        """Bytes that a thread needs for a pass over ``tokens`` tokens."""
        longest = max(self.hidden, self.inner, self.heads.heads * self.heads.dim)
        if isinstance(self.head, StoredLinear):
            return stored_linear.room(tokens, longest)
        return linear.room(tokens, longest * self.width)

    def reach(self, count: int) -> None:
        """Make sure that there are angles for ``count`` positions."""
        self.positions = count + max(TABLE, count // 4)
        kinds = {layer.kind for layer in self.layers}
        self.angles = {kind: angles(self._rotary, kind, self.positions) for kind in kinds}


class CompiledForward:
    """The program, and its buffers.

    Args:
        parts: of the model, with angles for all positions.
        size: of the largest pass.

    Attributes:
        kv: addresses of each layer's keys and values in each row's cache, int64 ``[layers, rows, 2]``.
        sought: each layer's and row's ``SoughtFields``, int64 ``[layers, rows, ...]``.
        mixed: queries, keys and values side by side, ``[layers or 1, tokens, width]``.
        x: what goes from layer to layer, ``[tokens, hidden]``.
    """

    def __init__(self, parts: Parts, size: Size) -> None:
        self.size, self.positions, self._parts = size, parts.positions, parts
        heads, n, count = parts.heads, size.tokens, len(parts.layers)
        width = (heads.heads + 2 * heads.kv_heads) * heads.dim
        self.x, self._sum = (torch.zeros(n, parts.hidden, dtype=torch.float32) for _ in range(2))
        self._words = torch.zeros(n, max(parts.hidden, heads.heads * heads.dim), dtype=parts.dtype)
        self._gated = torch.zeros(n, parts.inner, dtype=parts.dtype)
        self.mixed = torch.zeros(count if size.keeps else 1, n, width, dtype=torch.float32)
        self.kv = np.zeros((count, size.rows, 2), np.int64)
        self.sought = np.zeros((count, size.rows, SOUGHT_BYTES // 8), np.int64)
        self._tables: list[blockwise.Table] = []
        last = (NORM, self._norm(parts.norm, self.x, TO_WORDS, self._words, which=1))
        logits = (0, parts.head.out_features * 4)
        self._stages: list[list[Op]] = [
            [self._embed()],
            *([*self._attention(number, layer), *self._mlp(layer)] for number, layer in enumerate(parts.layers)),
            [last, self._linear([parts.head], self._words, PUT, logits, which=1)],
        ]

    @cached_property
    def program(self) -> executor.Program:
        """The whole pass."""
        return executor.Program([op for stage in self._stages for op in stage])

    @cached_property
    def stages(self) -> list[executor.Program]:
        """The same in parts: the embedding, each layer, and the head."""
        return [executor.Program(stage) for stage in self._stages]

    def _embed(self) -> Op:
        parts, scale = self._parts, embed_scale(self._parts.embedding)
        if isinstance(parts.embedding, StoredEmbedding):
            return LOOKUP, blockwise.look_up(parts.embedding.blocks, parts.hidden, _place(self.x), scale)
        table = _place(parts.embedding.weight)
        return EMBED, EmbedOp(executor.DO_EMBED, parts.kind, *table, parts.hidden, *_place(self.x), scale)

    def _attention(self, number: int, layer: Layer) -> list[Op]:
        part = layer.attention
        mixed, kv = self.mixed[number % len(self.mixed)], self.kv[number].ctypes.data
        see = self._see_chosen if self.size.chooses else self._see_all
        return [
            (NORM, self._norm(layer.before, self.x, TO_WORDS, self._words)),
            self._linear([part.q_proj, part.k_proj, part.v_proj], self._words, PUT, _place(mixed)),
            (ROTARY, self._turn(layer, mixed, kv)),
            *see(number, layer, mixed, kv),
            *self._back(part.o_proj, self._words, layer.behind),
        ]

    def _see_all(self, number: int, layer: Layer, mixed: torch.Tensor, kv: int) -> list[Op]:
        """Attention over all keys, in a fixed order."""
        parts, heads, spec = self._parts, self._parts.heads, layer.spec
        fields = (
            parts.kind, parts.width, heads.heads, heads.kv_heads, heads.dim, heads.out_dim, spec.window or 0,
            mixed.data_ptr(), mixed.stride(0) * 4, heads.dim * 4, kv, 0, *_place(self._words), parts.kind,
            spec.scaling / math.log(2), spec.softcap or 0.0,
        )  # fmt: skip
        return [(ATTEND, AttendOp(code, *fields)) for code in (executor.DO_SCAN, executor.DO_SETTLE)]

    def _see_chosen(self, number: int, layer: Layer, mixed: torch.Tensor, kv: int) -> list[Op]:
        """Attention over the keys that each query chooses."""
        parts, heads = self._parts, self._parts.heads
        fields = (
            parts.kind, parts.width, heads.heads, heads.kv_heads, heads.dim, mixed.data_ptr(), mixed.stride(0) * 4,
            heads.dim * 4, kv, self.sought[number].ctypes.data, 1, 1, *_place(self._words), parts.kind, 0,
            layer.spec.scaling / math.log(2),
        )  # fmt: skip
        codes = (executor.DO_SHORTEN, executor.DO_RANK, executor.DO_CHOOSE)
        return [(SOUGHT_OP, SoughtOp(code, *fields)) for code in codes]

    def _turn(self, layer: Layer, mixed: torch.Tensor, kv: int) -> RotaryOp:
        parts, heads, (cos, sin) = self._parts, self._parts.heads, self._parts.angles[layer.kind]
        norms = [getattr(layer.attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (0 if norm is None else norm.weight.data_ptr() for norm in norms)
        plus, least = (0, 0.0) if norms[0] is None else (one(norms[0]), eps(norms[0]))
        return RotaryOp(
            executor.DO_TURN, parts.kind, heads.heads, heads.kv_heads, heads.dim, *_place(mixed), q_norm, k_norm, plus,
            cos.data_ptr(), sin.data_ptr(), cos.shape[1], kv, least,
        )  # fmt: skip

    def _mlp(self, layer: Layer) -> list[Op]:
        mlp = layer.mlp
        gate = self._linear([mlp.gate_proj, mlp.up_proj], self._words, GATE, _place(self._gated))
        return [
            (NORM, self._norm(layer.before_mlp, self.x, TO_WORDS, self._words)),
            gate,
            *self._back(mlp.down_proj, self._gated, layer.behind_mlp),
        ]

    def _back(self, module: nn.Module, x: torch.Tensor, norm: Any) -> list[Op]:
        """A part's last linear layer: its results are normed, if there is a norm, and added to the residual stream."""
        if norm is None:
            return [self._linear([module], x, ADD, _place(self.x))]
        return [
            self._linear([module], x, PUT, _place(self._sum)),
            (NORM, self._norm(norm, self._sum, TO_SUM, self.x)),
        ]

    def _norm(self, norm: Any, x: torch.Tensor, mode: int, to: torch.Tensor, which: int = 0) -> NormOp:
        weight, kind = norm.weight, self._parts.kind
        where = (*_place(x), weight.data_ptr(), len(weight), *_place(to))
        return NormOp(executor.DO_NORM, which, kind, mode, one(norm), *where, eps(norm))

    def _linear(self, modules: Sequence[Any], x: torch.Tensor, mode: int, y: tuple[int, int], which: int = 0) -> Op:
        if isinstance(modules[0], StoredLinear):
            return self._stored(modules, x, mode, y, which)
        parts, weights = self._parts, [module.weight for module in modules]
        biases = [0 if module.bias is None else module.bias.data_ptr() for module in modules]
        places, outs = [weight.data_ptr() for weight in weights], [len(weight) for weight in weights]
        panels = sum(math.ceil(count / 16) for count in (outs[:1] if mode == GATE else outs))
        share, row = max(1, panels // (SHARES * self.size.threads)), weights[0].stride(0) * parts.width
        op = LinearOp(
            executor.DO_LINEAR, which, parts.kind, *_place(x), row, mode, parts.kind if mode == GATE else 0, share,
            share * self.size.threads, parts.activation, *y, *_three(places), *_three(outs), *_three(biases),
        )  # fmt: skip
        return LINEAR, op

    def _stored(
        self, modules: Sequence[StoredLinear], x: torch.Tensor, mode: int, y: tuple[int, int], which: int
    ) -> Op:
        table, columns = blockwise.described([module.blocks for module in modules]), modules[0].in_features
        self._tables.append(table)  # keeps alive what the program has the address of
        how = {"mode": mode, "which": which, "activation": self._parts.activation}
        return blockwise.operation(table, columns, _place(x), y, self.size.threads, **how)


def _place(t: torch.Tensor) -> tuple[int, int]:
    """A matrix's address, and the stride between rows in bytes."""
    return t.data_ptr(), t.stride(0) * t.element_size()


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    filled = (*values, 0, 0)
    return filled[0], filled[1], filled[2]
