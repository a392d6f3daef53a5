"""A pass of a supported decoder on a GPU: ten kernels per layer, over the model's weights.

Layers are described as for the compiled program (``architecture.py``). Matrices with the same input (queries, keys and
values; gate and up) become one product: their weights are moved once to be adjacent, and the model's modules keep views
of them. The residual stream is float32; inputs of products have the weights' type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import PreTrainedModel

from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kernels.gpu import attend, decoder_ops, linear
from forerun.kernels.gpu.decoder_ops import NormWeight, RotaryHeads, Summands
from forerun.kernels.gpu.pass_tables import PassTables
from forerun.kernels.linear.rowwise import SILU
from forerun.models.forward.architecture import (
    AttentionPart,
    DecoderLayer,
    MatrixRows,
    angles_at,
    describe,
    eps,
    weight_offset,
)
from forerun.models.forward.scorer import PassResult

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 ``[n, half]``."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes parts of ``x @ weight.T``, ``[parts, n, O]``."""
Attention = Callable[..., torch.Tensor]
"""Computes a layer's attention, with the arguments of ``attend.attend``; ``[1, H, n, d]`` in and out."""


class JoinedMatrix(NamedTuple):
    """Adjacent matrices ``[O, K]``, and their biases ``[O]``."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class GpuLayer(NamedTuple):
    """A layer's description, and its matrices as products read them."""

    parts: DecoderLayer
    attention: AttentionPart
    qkv: JoinedMatrix
    output: JoinedMatrix
    gate_up: JoinedMatrix
    down: JoinedMatrix


def join(matrices: Sequence[MatrixRows]) -> JoinedMatrix:
    """Make matrices adjacent in memory. Modules keep their parameters, which become views."""
    modules = list(dict.fromkeys(each.module for each in matrices))
    if len(modules) == 1:
        return JoinedMatrix(modules[0].weight.detach(), None if modules[0].bias is None else modules[0].bias.detach())
    biases = [module.bias for module in modules if module.bias is not None]
    if len(biases) not in (0, len(modules)):
        raise ValueError("some matrices with the same input have a bias, and some have none")
    return JoinedMatrix(_joined([module.weight for module in modules]), _joined(biases) if biases else None)


def _joined(tensors: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return one tensor with all of them. Adjacent ones are not moved, as other scorers have their addresses."""
    first = tensors[0].data
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return _moved(tensors)
        end += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _moved(tensors: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    first = 0
    with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():  # as the model was made
        joined = torch.cat([tensor.data for tensor in tensors])
        for tensor in tensors:
            tensor.data = joined[first : first + len(tensor)]
            first += len(tensor)
    return joined


class GpuForward:
    """Runs a model that ``architecture.known_on_gpu`` accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parts = parts = describe(model)
        self._layers = [
            GpuLayer(each, part, join(part.qkv), join([part.output]), join(each.gate_up), join([each.down]))
            for each, part in zip(parts.layers, parts.attention.values(), strict=True)
        ]
        self._norm, self._dtype = _norm(parts.norm), parts.dtype
        like, table = torch.empty(0, device=model.device), None
        if parts.limit is not None:  # the module reads positions on the CPU, which waits for the device
            table = angles_at(parts.rotary, like, torch.arange(parts.limit, device=model.device), None)
        self._table = table
        """Angles of all positions, if the model's module cannot compute them in a recorded pass."""

    def run(
        self,
        places: PassTables,
        attention: Attention,
        fetch: Callable[[int], None],
        states_of: tuple[int, ...] = (),
        product: Product = linear.sums,
    ) -> PassResult:
        """Run a pass described by tables; return float32 logits ``[wanted, V]``, and hidden states of ``states_of``.

        ``attention`` finds keys and values in their rows' memory; ``fetch`` is called before a layer's are written.
        """
        x = self._parts.embedding.weight[places.ids].float()
        if self._parts.embedding_factor != 1.0:
            x *= self._parts.embedding_factor
        angles, states = self._angles(x, places.positions), dict[int, torch.Tensor]()
        added: Summands | None = None
        after, factor = None, 1.0
        for number, layer in enumerate(self._layers):
            parts = layer.parts
            before = _norm(parts.before_mixer)
            h = decoder_ops.add_norm(x, added, after, before, factor, self._dtype, layer.qkv.weight)
            if number in states_of:
                states[number] = x.clone()
            fetch(number)
            mixed = self._attend(number, layer, h, places, angles[layer.attention.rotary], attention, product)
            factor = parts.residual_multiplier
            added = Summands(product(mixed, layer.output.weight), layer.output.bias)
            after = _norm(parts.after_mixer)
            before = _norm(parts.before_mlp)
            h = decoder_ops.add_norm(x, added, after, before, factor, self._dtype, layer.gate_up.weight)
            gate_up = Summands(product(h, layer.gate_up.weight), layer.gate_up.bias)
            gated = decoder_ops.gate(gate_up, self._parts.activation == SILU, self._dtype, layer.down.weight)
            added, after = Summands(product(gated, layer.down.weight), layer.down.bias), _norm(parts.after_mlp)
        head = self._parts.head.weight
        h = decoder_ops.add_norm(x, added, after, self._norm, factor, self._dtype, head)
        if len(self._layers) in states_of:
            states[len(self._layers)] = h.float()
        logits = self._finished(linear.product(h[places.wanted], head, to=torch.float32))
        return PassResult(logits, torch.cat([states[layer] for layer in states_of], -1) if states_of else None)

    def _angles(self, like: torch.Tensor, positions: torch.Tensor) -> dict[str | None, Angles]:
        if self._table is not None:
            cos, sin = self._table
            return {None: (cos[positions], sin[positions])}
        kinds = {layer.attention.rotary for layer in self._layers}
        return {kind: angles_at(self._parts.rotary, like, positions, kind) for kind in kinds}

    def _attend(
        self, number: int, layer: GpuLayer, h: torch.Tensor, places: PassTables,
        angles: Angles, attention: Attention, product: Product,
    ) -> torch.Tensor:  # fmt: skip
        parts, qkv = layer.attention, Summands(product(h, layer.qkv.weight), layer.qkv.bias)
        dim = parts.head_dim
        heads, kv_heads = parts.qkv[0].count // dim, parts.qkv[1].count // dim
        q_norm, k_norm = _norm(parts.q_norm), _norm(parts.k_norm)
        if q_norm is not None and k_norm is not None and len(q_norm.weight) != dim:  # over all heads together
            qkv, q_norm, k_norm = decoder_ops.norm_all_heads(qkv, q_norm, k_norm), None, None
        cos, sin = angles if parts.rotates else (None, None)
        how = RotaryHeads(heads, kv_heads, dim, q_norm, k_norm, cos, sin)
        q = decoder_ops.rotate_and_store(number, qkv, how, places, self._dtype)
        mixed = attention(number, q, kv_heads, places, parts.spec, following=layer.output.weight)
        return mixed.transpose(1, 2).reshape(len(h), heads * dim)

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        scaling, softcap = self._parts.logits_scaling, self._parts.logits_softcap
        if scaling != 1.0:
            logits = logits / scaling
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _norm(module: Any) -> NormWeight | None:
    return None if module is None else NormWeight(module.weight.detach(), weight_offset(module), eps(module))


def library_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with torch's library, whose bits depend on the number of rows; see ``Product``."""
    return functional.linear(x, weight)[None]


def library_attention(rows: Sequence[Rows]) -> Attention:
    """Make attention of one row's last tokens by torch, over each layer's keys and values ``[1, Hkv, m, d]``. What
    torch lacks (windows, soft caps, sinks) runs in the fixed order."""

    def attention(
        layer: int, q: torch.Tensor, kv_heads: int, places: PassTables, spec: AttentionSpec, **_: torch.Tensor
    ) -> torch.Tensor:
        (k, v), n = rows[layer], q.shape[2]
        if spec.softcap is not None or spec.sinks is not None or (spec.window or n + k.shape[2]) < k.shape[2]:
            return attend.attend(layer, q, kv_heads, places, spec)
        return functional.scaled_dot_product_attention(
            q, k, v, causal_lower_right(n, k.shape[2]), scale=spec.scaling, enable_gqa=True
        )

    return attention
