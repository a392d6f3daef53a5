"""The forward pass of common decoders as one program, without Python between its operations.

On a CPU a pass over a few tokens should take as long as memory needs to deliver the weights once. The layers of Python
around a model's operations take as long again for a small model, so the target's passes go this way where the model is
of a known shape; a comparison with the model's own forward pass decides (``native``). Weights are read where they lie.
Between weights all numbers are float32; what a linear layer reads is of the weights' type.

Every token's logits have the same bits whatever shares its pass, by the kernels' order of sums.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.attention import AttentionSpec
from forerun.block import Block
from forerun.caches.base import Cache
from forerun.caches.full import FullCache
from forerun.kernels import linear, tape
from forerun.kernels.canonical import ATTEND, AttendOp
from forerun.kernels.layers import EMBED, NORM, ROTARY, EmbedOp, NormOp, RotaryOp
from forerun.kernels.linear import ADD, GATE, LINEAR, PUT, LinearOp
from forerun.kernels.rowwise import GELU, SILU, TO_SUM, TO_WORDS
from forerun.model.packing import Heads, Packed, address
from forerun.model.scorer import Scorer

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
"""Model types of that shape: root mean square norms, rotary halves, gated linear units."""
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}
KINDS = {torch.float32: 0, torch.bfloat16: 1}
SHARES = 8
"""Pieces of work a thread that a matrix is cut into."""
TABLE = 4096
"""Positions by which the table of angles grows at least."""


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's parts, as modules; norms behind a part may be missing."""

    attention: Any
    mlp: Any
    before: Any
    behind: Any
    before_mlp: Any
    behind_mlp: Any
    spec: AttentionSpec
    kind: str | None


class NativeScorer(Scorer):
    """A scorer that runs a program of kernels over the model's own weights, for full caches.

    Args:
        model: of one of ``FAMILIES``; see ``native``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        decoder: Any = model.model
        self._decoder = decoder
        self._layers = [_layer(each, model.config) for each in decoder.layers]
        first = self._layers[0].attention
        dim = first.head_dim
        self._heads = Heads(first.q_proj.out_features // dim, first.k_proj.out_features // dim, dim, dim)
        self._kind = KINDS[model.dtype]
        self._width = model.dtype.itemsize
        self._hidden = model.config.hidden_size
        self._inner = self._layers[0].mlp.gate_proj.out_features
        self._lock = threading.Lock()
        self._tokens = self._rows = self._positions = 0
        self._slots = self._parts = torch.empty(0, dtype=torch.uint8)

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """See ``Scorer.score``; other caches than full ones go through the model's own forward pass."""
        full = [cache for cache in caches if isinstance(cache, FullCache)]
        if len(full) < len(caches):
            return super().score(blocks, caches)
        with self._lock:
            logits = self._run(Packed(blocks, self._heads, torch.get_num_threads()), full)
        return list(torch.split(logits, [len(block.tree) + 1 for block in blocks]))

    def _run(self, packed: Packed, caches: Sequence[FullCache]) -> torch.Tensor:
        wanted = packed.wanted
        self._make_room(packed, len(wanted))
        heads, layers, threads = self._heads, len(self._layers), torch.get_num_threads()
        strides = []
        for row, (cache, count) in enumerate(zip(caches, packed.counts, strict=True)):
            store = cache.reserve(layers, heads.kv_heads, heads.dim, self.model.dtype, count)
            self._kv[:layers, row] = cache.addresses
            strides.append((store.stride(2) * self._width, store.stride(3) * self._width) * 2)
        rows = packed.rows(strides)
        logits = torch.empty(len(wanted), self._head.out_features)
        self._program.run(
            n=packed.n, wanted=len(wanted), wanted_list=address(wanted), ids=address(packed.ids), y=logits.data_ptr(),
            rows=address(rows), units=address(packed.units), unit_count=packed.unit_count,
            owners=address(packed.owners), positions=address(packed.positions), parents=address(packed.parents),
            parts=self._parts.data_ptr(), slots=self._slots.data_ptr(),
            slot_size=len(self._slots) // threads // 64 * 64,
        )  # fmt: skip
        self._tell(packed, caches)
        return logits

    def _tell(self, packed: Packed, caches: Sequence[FullCache]) -> None:
        """What sparse caches ask of a full one."""
        heads, first = self._heads, 0
        for cache, count in zip(caches, packed.counts, strict=True):
            cache.specs = {i: layer.spec for i, layer in enumerate(self._layers)}
            if self.keeps_queries:
                turned = self._mixed[:, first : first + count, : heads.heads * heads.dim]
                parted = turned.unflatten(2, (heads.heads, heads.dim)).transpose(1, 2)
                cache.queries = {i: queries[None] for i, queries in enumerate(parted)}
            first += count

    def _make_room(self, packed: Packed, wanted: int) -> None:
        """Buffers for as many tokens, rows and positions; the program is written anew where one has to grow."""
        threads = torch.get_num_threads()
        row = max(self._hidden, self._inner, self._heads.heads * self._heads.dim) * self._width
        slot = max(packed.slot_size, linear.room(packed.n, row)) + 4096
        if len(self._slots) < threads * slot:
            self._slots = torch.empty(threads * slot, dtype=torch.uint8)
        if len(self._parts) < packed.parts_size:
            self._parts = torch.empty(packed.parts_size + packed.parts_size // 4, dtype=torch.uint8)
        keeps = self._tokens and (len(self._mixed) > 1) != (self.keeps_queries and len(self._layers) > 1)
        small = self._tokens < packed.n or self._rows < len(packed.blocks) or self._positions < packed.reach
        if small or keeps or self._threads != threads or self._seen != self._weights():
            self._tokens = max(self._tokens, 1 << max(3, (packed.n - 1).bit_length()))
            self._rows = max(self._rows, len(packed.blocks))
            self._write(packed.reach, threads)

    def _weights(self) -> int:
        """Changes when weights move."""
        return int(self._inputs.weight.data_ptr())

    def _write(self, reach: int, threads: int) -> None:
        """The program for at most so many tokens."""
        heads, n, layers = self._heads, self._tokens, len(self._layers)
        self._threads, self._seen = threads, self._weights()
        self._head: Any = self.model.lm_head
        if self._positions < reach:
            self._positions = reach + max(TABLE, reach // 4)
            self._angles = _angles(self._decoder, self._layers, self._positions)
        width = (heads.heads + 2 * heads.kv_heads) * heads.dim
        self._x = torch.zeros(n, self._hidden)
        self._words = torch.zeros(n, max(self._hidden, heads.heads * heads.dim), dtype=self.model.dtype)
        self._gated = torch.zeros(n, self._inner, dtype=self.model.dtype)
        self._mixed = torch.zeros(layers if self.keeps_queries else 1, n, width)
        self._sum = torch.zeros(n, self._hidden)
        self._kv = np.zeros((layers, self._rows, 2), np.int64)
        ops: list[tuple[Any, Any]] = [(EMBED, self._embed())]
        for number, layer in enumerate(self._layers):
            ops += self._attention(number, layer)
            ops += self._mlp(layer)
        ops += [(NORM, self._norm(self._decoder.norm, self._x, TO_WORDS, self._words, which=1))]
        logits = (0, self._head.out_features * 4)
        ops += [(LINEAR, self._linear([self._head], self._words, PUT, logits, which=1))]
        self._program = tape.Program(ops)

    def _embed(self) -> EmbedOp:
        table, x = self._inputs.weight, self._x
        factor = float(getattr(self._inputs, "embed_scale", 1.0))
        return EmbedOp(
            tape.DO_EMBED, self._kind, table.data_ptr(), table.stride(0) * self._width, self._hidden, *_place(x), factor
        )

    def _attention(self, number: int, layer: _Layer) -> list[tuple[Any, Any]]:
        part, heads = layer.attention, self._heads
        mixed = self._mixed[number if len(self._mixed) > 1 else 0]
        kv = self._kv[number].ctypes.data
        norms = [getattr(part, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (norm.weight.data_ptr() if norm is not None else 0 for norm in norms)
        one, eps = (_one(norms[0]), _eps(norms[0])) if norms[0] is not None else (0, 0.0)
        cos, sin = self._angles[layer.kind]
        shape = (self._kind, heads.heads, heads.kv_heads, heads.dim)
        turn = RotaryOp(
            tape.DO_TURN, *shape, *_place(mixed), q_norm, k_norm, one, cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            kv, eps,
        )  # fmt: skip
        q = (mixed.data_ptr(), mixed.stride(0) * 4, heads.dim * 4)
        spec = layer.spec
        fields = (
            self._kind, self._width, heads.heads, heads.kv_heads, heads.dim, heads.out_dim, spec.window or 0, *q, kv,
            0, *_place(self._words), self._kind, spec.scaling / math.log(2), spec.softcap or 0.0,
        )  # fmt: skip
        return [
            (NORM, self._norm(layer.before, self._x, TO_WORDS, self._words)),
            (LINEAR, self._linear([part.q_proj, part.k_proj, part.v_proj], self._words, PUT, _place(mixed))),
            (ROTARY, turn),
            (ATTEND, AttendOp(tape.DO_SCAN, *fields)),
            (ATTEND, AttendOp(tape.DO_SETTLE, *fields)),
            *self._back(part.o_proj, self._words, layer.behind),
        ]

    def _mlp(self, layer: _Layer) -> list[tuple[Any, Any]]:
        mlp = layer.mlp
        gate = self._linear([mlp.gate_proj, mlp.up_proj], self._words, GATE, _place(self._gated))
        return [
            (NORM, self._norm(layer.before_mlp, self._x, TO_WORDS, self._words)),
            (LINEAR, gate),
            *self._back(mlp.down_proj, self._gated, layer.behind_mlp),
        ]

    def _back(self, module: nn.Linear, x: torch.Tensor, norm: Any) -> list[tuple[Any, Any]]:
        """A part's last layer, whose results are added to the residual stream, normed first where there is a norm."""
        if norm is None:
            return [(LINEAR, self._linear([module], x, ADD, _place(self._x)))]
        return [
            (LINEAR, self._linear([module], x, PUT, _place(self._sum))),
            (NORM, self._norm(norm, self._sum, TO_SUM, self._x)),
        ]

    def _norm(self, norm: Any, x: torch.Tensor, mode: int, to: torch.Tensor, which: int = 0) -> NormOp:
        weight = norm.weight
        return NormOp(
            tape.DO_NORM, which, self._kind, mode, _one(norm), *_place(x), weight.data_ptr(), len(weight), *_place(to),
            _eps(norm),
        )  # fmt: skip

    def _linear(
        self, modules: Sequence[nn.Linear], x: torch.Tensor, mode: int, y: tuple[int, int], which: int = 0
    ) -> LinearOp:
        weights = [module.weight for module in modules]
        biases = [0 if module.bias is None else module.bias.data_ptr() for module in modules]
        row = weights[0].stride(0) * self._width
        places, outs = [weight.data_ptr() for weight in weights], [len(weight) for weight in weights]
        panels = sum(math.ceil(count / 16) for count in (outs[:1] if mode == GATE else outs))
        share = max(1, panels // (SHARES * self._threads))
        act = ACTIVATIONS[_activation(self.model.config)]
        return LinearOp(
            tape.DO_LINEAR, which, self._kind, *_place(x), row, mode, self._kind if mode == GATE else 0, share, act, *y,
            *_three(places), *_three(outs), *_three(biases),
        )  # fmt: skip


def native(scorer: Scorer) -> Scorer:
    """The same model as a program, if its shape is known; else as it is. Whether they agree is for the gate to say."""
    return NativeScorer(scorer.model) if type(scorer) is Scorer and _known(scorer.model) else scorer


def _known(model: PreTrainedModel) -> bool:
    config = model.config
    if config.model_type not in FAMILIES or model.dtype not in KINDS or model.device.type != "cpu":
        return False
    if _activation(config) not in ACTIVATIONS or getattr(config, "final_logit_softcapping", None):
        return False
    return _plain(model) and _fits(model)


def _plain(model: PreTrainedModel) -> bool:
    """Whether every module is what it seems: no hooks, no other forward than its class's, one type of weights."""
    return all(
        not module._forward_hooks and not module._forward_pre_hooks and "forward" not in module.__dict__
        for module in model.modules()
    ) and all(weight.dtype == model.dtype and weight.device.type == "cpu" for weight in model.parameters())


def _fits(model: PreTrainedModel) -> bool:
    """Whether rows are whole vectors."""
    whole = 64 // model.dtype.itemsize
    for layer in model.model.layers:
        part, mlp = layer.self_attn, layer.mlp
        modules = [part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(type(module) is not nn.Linear or module.in_features % whole for module in modules):
            return False
        if part.head_dim % 16 or any(not module.weight.is_contiguous() for module in modules):
            return False
    head = model.lm_head
    return type(head) is nn.Linear and head.bias is None and bool(head.weight.is_contiguous())


def _layer(layer: Any, config: Any) -> _Layer:
    part = layer.self_attn
    window = getattr(part, "sliding_window", getattr(config, "sliding_window", None))
    spec = AttentionSpec(part.scaling, window, getattr(part, "attn_logit_softcapping", None))
    kind = getattr(part, "layer_type", None) if config.model_type == "gemma3_text" else None
    if hasattr(layer, "pre_feedforward_layernorm"):
        norms = (layer.post_attention_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm)
    else:
        norms = (None, layer.post_attention_layernorm, None)
    return _Layer(part, layer.mlp, layer.input_layernorm, *norms, spec, kind)


def _angles(decoder: Any, layers: Sequence[_Layer], count: int) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines of every position, ``[count, half]`` each, by kind of layer."""
    positions, like = torch.arange(count)[None], torch.empty(0)
    found = {}
    for kind in {layer.kind for layer in layers}:
        turned = decoder.rotary_emb(like, positions) if kind is None else decoder.rotary_emb(like, positions, kind)
        found[kind] = tuple(part[0, :, : part.shape[2] // 2].float().contiguous() for part in turned)
    return found  # type: ignore[return-value]


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def _one(norm: Any) -> int:
    """Whether a norm adds 1 to its weight, as Gemma's do."""
    return int("Gemma" in type(norm).__name__)


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _place(t: torch.Tensor) -> tuple[int, int]:
    """The address of a matrix, and the bytes from row to row."""
    return t.data_ptr(), t.stride(0) * t.element_size()


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    filled = (*values, 0, 0)
    return filled[0], filled[1], filled[2]
