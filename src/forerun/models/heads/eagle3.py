"""EAGLE-3 (Li et al., 2025, section 3): one decoder layer over three of the target's hidden states and the next token.

An entry's input is the hidden state of a token, three layers' side by side and made narrower by ``fc``, and the
embedding of the token after it. Behind the text the head's own output takes the place of the target's states. It may
know a part of the vocabulary: ``d2t`` holds for each of its tokens how far on the target's id is.

Two forms are read: that of the authors (SafeAILab) and that of ``speculators``, whose configuration has the layer's own
inside. Layers of the target are counted as vLLM counts them: 0 is the embedding, i what leaves the i-th layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.kernels.attention.attention import AttentionSpec
from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import Scorer, running_pass
from forerun.models.heads.head import (
    ROTARY_FIELDS,
    HeadFile,
    RecurrentHead,
    check_layers,
    config_of,
    count_in,
    input_embeddings,
    rms_norm,
    rotated,
)
from forerun.models.heads.matrices import linear, placed, weight_beside
from forerun.models.heads.shortlist import OutputMatrix

AUX_STATES = 3
"""The target's hidden states that an entry has."""


class Eagle3Head(RecurrentHead):
    """A head in a folder.

    Args:
        folder: with ``config.json`` and safetensors files.

    Raises:
        ValueError: if they are not those of such a head; says which part.
    """

    shift = -1

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = config_of(self.folder)
        inner = self.config.get("transformer_layer_config")
        self._layer = inner if isinstance(inner, dict) else self.config  # the configuration of the decoder layer
        size, heads, self._inner, self._vocabulary = (
            count_in(self._layer, name, self.folder)
            for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        )
        if self._layer.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers is {self._layer['num_hidden_layers']} in {self.folder}; it must be 1")
        self._size, self._heads = size, heads
        self._kv_heads = int(self._layer.get("num_key_value_heads") or heads)
        self._dim = int(self._layer.get("head_dim") or size // heads)
        self._known = self.config.get("draft_vocab_size") or self._vocabulary
        self._eps = float(self._layer.get("rms_norm_eps", 1e-6))
        self._norm_first = bool(self.config.get("norm_before_residual", False))
        self._act = ACT2FN[self._layer.get("hidden_act", "silu")]
        self._weights: dict[str, torch.Tensor] = {}
        self._spec = AttentionSpec(self._dim**-0.5)

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        config = text_config(target.model)
        self._target, count, wide = target, int(config.num_hidden_layers), int(config.hidden_size)
        ids = _aux_layers(self.config, count)
        self.layers = check_layers(ids, count, "eagle_aux_hidden_state_layer_ids", self.folder)
        if len(self.layers) != AUX_STATES:
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids has {len(self.layers)} layers; it must have {AUX_STATES}"
            )
        if self._vocabulary != target.vocabulary:
            raise ValueError(
                f"the EAGLE-3 head in {self.folder} is for a vocabulary of {self._vocabulary} tokens, "
                f"and the target has {target.vocabulary}"
            )
        stated = self.config.get("target_hidden_size") or self._size
        if stated != wide:
            raise ValueError(
                f"the EAGLE-3 head in {self.folder} reads hidden states of {stated} numbers, and the target has {wide}"
            )
        self.token_bytes = 2 * self._kv_heads * self._dim * target.model.dtype.itemsize
        self._load(target, wide)

    def _load(self, target: Scorer, wide: int) -> None:
        """Read all weights, in the target's type."""
        file, size, w = HeadFile(self.folder, "EAGLE-3"), self._size, dict[str, torch.Tensor | None]()
        w["fc"] = file.take("fc.weight", size, AUX_STATES * wide)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            w[name] = file.take(f"layers.0.{name}.weight", size)
        out, kv = self._heads * self._dim, self._kv_heads * self._dim
        shapes = {"q": (out, 2 * size), "k": (kv, 2 * size), "v": (kv, 2 * size), "o": (size, out)}
        for part, shape in shapes.items():
            w[part] = file.take(f"layers.0.self_attn.{part}_proj.weight", *shape)
            w[f"{part}_bias"] = file.find(f"layers.0.self_attn.{part}_proj.bias", shape[0])
        for part in ("q_norm", "k_norm"):
            w[part] = file.find(f"layers.0.self_attn.{part}.weight", self._dim)
        for part, shape in (("gate", (self._inner, size)), ("up", (self._inner, size)), ("down", (size, self._inner))):
            w[part] = file.take(f"layers.0.mlp.{part}_proj.weight", *shape)
        w["norm"] = file.take("norm.weight", size)
        if self.config.get("norm_before_fc"):
            w["input_norm"] = file.take("input_norm.weight", AUX_STATES * wide)
        w["embed"] = file.find("embed_tokens.weight", self._vocabulary, size)
        find_head = file.find if self._known == self._vocabulary else file.take
        w["head"] = find_head("lm_head.weight", self._known, size)
        if size != wide and (w["embed"] is None or w["head"] is None):
            raise ValueError(
                f"the EAGLE-3 head in {self.folder} is {size} wide and the target {wide}; "
                "so it needs embed_tokens.weight and lm_head.weight of its own"
            )
        self._map_tokens(file, target)
        self._weights = {
            name: (placed if name == "embed" else weight_beside)(target, each)
            for name, each in w.items()
            if each is not None
        }
        own = self._weights.pop("head", None)
        self._matrix = OutputMatrix.of_target(target) if own is None else OutputMatrix.of(own)
        self.output = self._matrix if self.tokens is None else None
        fields = {name: value for name, value in self._layer.items() if name in ROTARY_FIELDS}
        self._rotary = LlamaRotaryEmbedding(LlamaConfig(**fields, head_dim=self._dim)).to(target.device)

    def _map_tokens(self, file: HeadFile, target: Scorer) -> None:
        self.tokens = None
        if self._known == self._vocabulary:
            return
        offsets = file.take("d2t", self._known).to(torch.int64)
        tokens = torch.arange(self._known) + offsets
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            raise ValueError(f"d2t in {self.folder} names tokens outside of the vocabulary of {self._vocabulary}")
        self.tokens = tokens.to(target.device)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        w = self._weights
        states = states.to(w["norm"].dtype)
        if "input_norm" in w:
            states = rms_norm(states, w["input_norm"], self._eps)
        return linear(states, w["fc"])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if "embed" in self._weights:
            return torch.nn.functional.embedding(tokens, self._weights["embed"])
        return input_embeddings(self._target, tokens)

    def forward(
        self, layer: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        w, eps = self._weights, self._eps
        normed = rms_norm(hidden, w["hidden_norm"], eps)
        x = torch.cat([rms_norm(embeddings.to(hidden.dtype), w["input_layernorm"], eps), normed], -1)
        residual = (normed if self._norm_first else hidden) + self._attention(x, positions)
        x = rms_norm(residual, w["post_attention_layernorm"], eps)
        return residual + linear(self._act(linear(x, w["gate"])) * linear(x, w["up"]), w["down"])

    def _attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        w, n = self._weights, len(x)
        q, k, v = (
            linear(x, w[part], w.get(f"{part}_bias")).view(1, n, -1, self._dim).transpose(1, 2) for part in "qkv"
        )
        q, k = (
            rms_norm(each, w[norm], self._eps) if norm in w else each for each, norm in ((q, "q_norm"), (k, "k_norm"))
        )
        cos, sin = self._rotary(x, positions[None])
        out = running_pass().attend(0, rotated(q, cos, sin), rotated(k, cos, sin), v, self._spec)
        return linear(out.transpose(1, 2).reshape(n, -1), w["o"], w.get("o_bias"))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._matrix(rms_norm(hidden, self._weights["norm"], self._eps))


def _aux_layers(config: dict[str, Any], count: int) -> tuple[Any, ...]:
    """The layers of a target of ``count`` before which its states are read, as either form names them.

    SpecForge numbers the layers behind which it reads; its default is known by that.
    """
    inner, default = config.get("eagle_config"), (2, count // 2, count - 3)
    name = "eagle_aux_hidden_state_layer_ids"
    ids = tuple(config.get(name) or (inner.get(name) if isinstance(inner, dict) else None) or default)
    return default if ids == tuple(layer - 1 for layer in default) else ids


def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether a configuration is that of an EAGLE-3 head."""
    names = config.get("architectures") or [""]
    return config.get("speculators_model_type") == "eagle3" or "Eagle3" in str(names[0]) or (
        "draft_vocab_size" in config and "speculators_model_type" not in config
    )  # fmt: skip
