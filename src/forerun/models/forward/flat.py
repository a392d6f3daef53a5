"""The forward pass of the most common decoders as one function, for inner levels that no program can run (``native``).

Inner levels make many passes over one or a few tokens, and a small model's pass spends more time in Python than in its
operations. Their logits decide what is drafted, never what is generated. So they may round differently from the model's
own forward pass. The target's verifying passes never come here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, silu
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.linear import ordered_modules
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Attends, Scorer, SelfTest, tested
from forerun.models.forward.sharded import is_sharded
from forerun.models.loading.stored_weights import is_stored

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Supported model types. They share one structure: normalised inputs, rotary halves, gated linear units."""
TOLERANCE = 0.05
"""If the logits' relative error (norm over the vocabulary) is larger, the model does not have this structure."""

MANY = 2**17
"""Least numbers in a matrix for Forerun's kernel. From here on it was measured to be as fast as torch's for one token,
and faster for more, in float32 and bfloat16. Calling it costs 15 microseconds more (``docs/decisions.md``)."""


def flatten(scorer: Scorer, self_test: SelfTest = tested) -> Scorer:
    """A ``FlatScorer`` if the model has a known structure and the logits agree; else ``scorer`` itself."""
    if not isinstance(scorer, Scorer) or isinstance(scorer, FlatScorer) or not _known(scorer.model):
        return scorer
    flat = FlatScorer(scorer.model)
    differs = self_test(flat, lambda: None if _error(scorer, flat) < TOLERANCE else "its logits differ")
    return flat if differs is None else scorer


class _Layer(NamedTuple):
    """One decoder layer's weights; biases and norms of heads may be missing."""

    number: int
    before: torch.Tensor
    q: tuple[torch.Tensor, torch.Tensor | None]
    k: tuple[torch.Tensor, torch.Tensor | None]
    v: tuple[torch.Tensor, torch.Tensor | None]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    after: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    spec: AttentionSpec


class FlatScorer(Scorer):
    """A scorer that runs the layers' operations itself, over the model's own weights.

    Args:
        model: of one of ``FAMILIES``; see ``flatten``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        decoder: Any = model.model
        self._embedding = decoder.embed_tokens.weight
        self._layers = [_layer(layer) for layer in decoder.layers]
        self._norm = decoder.norm.weight
        self._eps = decoder.norm.variance_epsilon
        self._head = model.lm_head.weight
        self._rotary = decoder.rotary_emb
        self._dim = decoder.layers[0].self_attn.head_dim

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: Attends, wanted: int | torch.Tensor
    ) -> torch.Tensor:
        x = self._embedding[ids]
        cos, sin = self._turns(x, positions)
        for layer in self._layers:
            q, k, v = self._project(layer, rms_norm(x, x.shape[1:], layer.before, self._eps), cos, sin)
            seen = rows.attend(layer.number, q, k, v, layer.spec)
            x = _added(x, seen.transpose(1, 2).reshape(len(x), -1), layer.out)
            h = rms_norm(x, x.shape[1:], layer.after, self._eps)
            x = _added(x, silu(_product(h, layer.gate)).mul_(_product(h, layer.up)), layer.down)
        if isinstance(wanted, torch.Tensor):
            x = x[wanted.to(x.device)]
        return _product(rms_norm(x, x.shape[1:], self._norm, self._eps), self._head)

    def _turns(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[n, 1, d]``; the sines include the rotation's sign."""
        cos, sin = self._rotary(like, positions[None])
        half = self._dim // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return cos[0].unsqueeze(1), signed.unsqueeze(1)

    def _project(
        self, layer: _Layer, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries, rotated keys, and values, ``[1, heads, n, d]`` each."""
        n, d = len(h), self._dim
        q, k, v = (_product(h, *weights).view(n, -1, d) for weights in (layer.q, layer.k, layer.v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (rms_norm(t, (d,), w, self._eps) for t, w in ((q, layer.q_norm), (k, layer.k_norm)))
        both = torch.cat((q, k), 1)
        turned = torch.addcmul(both * cos, both.roll(d // 2, -1), sin)
        q, k = turned[:, : q.shape[1]], turned[:, q.shape[1] :]
        return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer; large matrices take Forerun's kernel, which runs at the memory's speed for a few tokens."""
    ours = weight.numel() >= MANY and ordered_modules.takes(x, weight)
    return ordered_modules.product(x, weight, bias) if ours else linear(x, weight, bias)


def _added(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` plus the product of ``y`` and ``weight``."""
    return torch.addmm(x, y, weight.t()) if weight.numel() < MANY else _product(y, weight).add_(x)


def _known(model: PreTrainedModel) -> bool:
    config = model.config
    plain = config.model_type in FAMILIES and config.hidden_act == "silu"
    return plain and not is_stored(model) and not is_sharded(model) and model.lm_head.bias is None


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention.config, "sliding_window", None)  # Mistral's holds for all layers
    q, k, v = ((part.weight, part.bias) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    return _Layer(
        attention.layer_idx,
        layer.input_layernorm.weight,
        q,
        k,
        v,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight,
        after=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        spec=AttentionSpec(attention.scaling, getattr(attention, "sliding_window", window)),
    )


@torch.inference_mode()
def _error(scorer: Scorer, flat: Scorer) -> float:
    """The largest relative difference of the two scorers' logits over a few tokens and a tree."""
    tokens = np.arange(6) % scorer.vocabulary
    tree = DraftTree(tokens[:4], np.array([-1, 0, 0, -1]))
    block = Block(tokens, tree, 0)
    own, other = (each.score([block], [FullCache()])[0].double() for each in (scorer, flat))
    return float(((own - other).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12)).max())
