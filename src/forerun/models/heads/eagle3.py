"""EAGLE-3 (Li et al., 2025, section 3): one decoder layer over three of the target's hidden states and the next token.

An entry's input is a token's hidden states (several layers' concatenated and narrowed by ``fc``) and the next token's
embedding. Beyond the sequence, the head's output replaces the target's states. It may have a part of the vocabulary:
``d2t`` holds each token's offset to the target's id.

EAGLE-3.1 ("attention drift", 2605.09992) keeps these inputs' magnitude constant over depth: ``fc_norm`` normalises each
state before ``fc`` (``norm_before_fc``: all as one), and ``norm_output`` feeds the output back after the final norm.

Supported are the authors' format (SafeAILab) and that of ``speculators``, which nests the layer's configuration. Layers
are counted as in vLLM: 0 is the embedding, i the output of the i-th layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.kernels.attention.attention import AttentionSpec
from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import Scorer, running_pass
from forerun.models.heads.entries import ROTARY_FIELDS, check_entries, check_layers, config_of, count_in, windows
from forerun.models.heads.head import Head
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.matrices import linear, placed, weight_beside
from forerun.models.heads.norms_and_rotary import rms_norm, rotated
from forerun.models.heads.recurrent_head import RecurrentHead
from forerun.models.heads.shortlist import OutputMatrix
from forerun.models.heads.vocabulary import input_embeddings, known_tokens, own_matrix

EAGLE_ENTRIES = frozenset(
    {"eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "norm_before_fc", "norm_before_residual",
     "norm_output"}
)  # fmt: skip
EAGLE_SINGLE_VALUED: Mapping[str, Any] = {
    "is_causal": True, "next_layer_regular": True, "parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1,
    "parallel_drafting": False, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}  # fmt: skip
"""Entries of ``eagle_config``, or beside it, that are supported with one value only."""
NO_PRODUCTS = frozenset({"embed", "fc_norm"})
"""Two-dimensional weights that are not multiplied with as a matrix."""


class EagleHead(Head):
    """What EAGLE-3 and P-EAGLE heads share: decoder layers from a folder; raises ValueError for what does not fit."""

    kind = "EAGLE-3"
    read_entries = EAGLE_ENTRIES
    single_valued: Mapping[str, Any] = EAGLE_SINGLE_VALUED

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = config_of(self.folder)
        inner, more = self.config.get("transformer_layer_config"), self.config.get("eagle_config")
        self._layer = inner if isinstance(inner, dict) else self.config  # the decoder layers' configuration
        for part in (self.config, inner, more):
            if isinstance(part, dict):
                check_entries(part, self.read_entries, self.single_valued, self.kind, self.folder)
        size, heads, self._inner, self._vocabulary = (
            count_in(self._layer, name, self.folder)
            for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        )
        self.count = int(self._layer.get("num_hidden_layers") or 1)
        self._size, self._heads = size, heads
        self._kv_heads = int(self._layer.get("num_key_value_heads") or heads)
        self._dim = int(self._layer.get("head_dim") or size // heads)
        self._draft_vocabulary = self.config.get("draft_vocab_size") or self._vocabulary
        self._eps = float(self._layer.get("rms_norm_eps", 1e-6))
        self._norm_first = bool(self.config.get("norm_before_residual", False))
        settings = {**self.config, **more} if isinstance(more, dict) else self.config
        self._norms = {name: bool(settings.get(name)) for name in ("norm_before_fc", "fc_norm")}
        if all(self._norms.values()):
            raise ValueError(f"norm_before_fc and fc_norm are both True in {self.folder / 'config.json'}")
        self._act = ACT2FN[self._layer.get("hidden_act", "silu")]
        self._specs = [
            AttentionSpec(self._dim**-0.5, window=window) for window in windows(self._layer, self.count, self.folder)
        ]

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        config = text_config(target.model)
        self._target, count, wide = target, int(config.num_hidden_layers), int(config.hidden_size)
        ids = _aux_layers(self.config, count)
        self.layers = check_layers(ids, count, "eagle_aux_hidden_state_layer_ids", self.folder)
        if self._vocabulary != target.vocabulary:
            raise ValueError(
                f"the {self.kind} head in {self.folder} is for a vocabulary of {self._vocabulary} tokens, "
                f"and the target has {target.vocabulary}"
            )
        stated = self.config.get("target_hidden_size") or self._size
        if stated != wide:
            raise ValueError(
                f"the {self.kind} head in {self.folder} expects hidden size {stated}, and the target's is {wide}"
            )
        self.token_bytes = 2 * self.count * self._kv_heads * self._dim * target.model.dtype.itemsize
        self._load(HeadFile(self.folder, self.kind), target, wide)

    def _load(self, file: HeadFile, target: Scorer, wide: int) -> None:
        size, states, w = self._size, len(self.layers), dict[str, torch.Tensor | None]()
        w["fc"] = file.take("fc.weight", size, states * wide)
        if self._norms["norm_before_fc"]:
            w["input_norm"] = file.take("input_norm.weight", states * wide)
        if self._norms["fc_norm"]:
            norms = [file.take(f"fc_norm.{number}.weight", wide) for number in range(states)]
            w["fc_norm"] = torch.stack(norms)
        w["norm"] = file.take("norm.weight", size)
        model, theirs = target.model, (self._vocabulary, wide)
        ins, outs = model.get_input_embeddings(), model.get_output_embeddings()
        w["embed"] = own_matrix(file, "embed_tokens.weight", (self._vocabulary, size), theirs, ins)
        tied = (
            self.config.get("tie_word_embeddings") and file.find("lm_head.weight", self._draft_vocabulary, size) is None
        )
        w["head"] = (
            w["embed"] if tied else own_matrix(file, "lm_head.weight", (self._draft_vocabulary, size), theirs, outs)
        )
        own = None if (head := w.pop("head")) is None else weight_beside(target, head)
        self._weights, *self._layer_weights = (
            {
                name: (placed if name in NO_PRODUCTS else weight_beside)(target, each)
                for name, each in part.items()
                if each is not None
            }
            for part in (w, *(self._take_layer(file, layer) for layer in range(self.count)))
        )
        tokens = known_tokens(file, self._draft_vocabulary, self._vocabulary, self.folder)
        self.tokens = tokens if tokens is None else tokens.to(target.device)
        self.matrix = OutputMatrix.of_target(target) if own is None else OutputMatrix.of(own)
        self.output = self.matrix if self.tokens is None else None
        fields = {name: value for name, value in self._layer.items() if name in ROTARY_FIELDS}
        self._rotary = LlamaRotaryEmbedding(LlamaConfig(**fields, head_dim=self._dim)).to(target.device)

    def _take_layer(self, file: HeadFile, layer: int) -> dict[str, torch.Tensor | None]:
        size, at, w = self._size, f"layers.{layer}.", dict[str, torch.Tensor | None]()
        for name in ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if layer == 0 else ())):
            w[name] = file.take(f"{at}{name}.weight", size)
        out, kv, wide = self._heads * self._dim, self._kv_heads * self._dim, size * (2 if layer == 0 else 1)
        for part, shape in {"q": (out, wide), "k": (kv, wide), "v": (kv, wide), "o": (size, out)}.items():
            w[part] = file.take(f"{at}self_attn.{part}_proj.weight", *shape)
            w[f"{part}_bias"] = file.find(f"{at}self_attn.{part}_proj.bias", shape[0])
        for part in ("q_norm", "k_norm"):
            w[part] = file.find(f"{at}self_attn.{part}.weight", self._dim)
        for part, shape in (("gate", (self._inner, size)), ("up", (self._inner, size)), ("down", (size, self._inner))):
            w[part] = file.take(f"{at}mlp.{part}_proj.weight", *shape)
        return w

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Project the target's states ``[n, layers * hidden]`` to the first layer's input, ``[n, hidden]``."""
        w = self._weights
        states = states.to(w["norm"].dtype)
        if "input_norm" in w:
            states = rms_norm(states, w["input_norm"], self._eps)
        if "fc_norm" in w:
            each = states.view(len(states), *w["fc_norm"].shape)
            states = rms_norm(each, w["fc_norm"], self._eps).flatten(1)
        return linear(states, w["fc"])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if "embed" in self._weights:
            return torch.nn.functional.embedding(tokens, self._weights["embed"])
        return input_embeddings(self._target, tokens)

    def decoder_layer(
        self, layer: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer, ``[n, hidden]`` in and out; only the first one uses the embeddings."""
        w, eps = self._layer_weights[layer], self._eps
        if layer == 0:
            normed = rms_norm(hidden, w["hidden_norm"], eps)
            x = torch.cat([rms_norm(embeddings.to(hidden.dtype), w["input_layernorm"], eps), normed], -1)
            hidden = normed if self._norm_first else hidden
        else:
            x = rms_norm(hidden, w["input_layernorm"], eps)
        residual = hidden + self._attention(layer, x, positions)
        x = rms_norm(residual, w["post_attention_layernorm"], eps)
        return residual + linear(self._act(linear(x, w["gate"])) * linear(x, w["up"]), w["down"])

    def _attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        w, n = self._layer_weights[layer], len(x)
        q, k, v = (
            linear(x, w[part], w.get(f"{part}_bias")).view(1, n, -1, self._dim).transpose(1, 2) for part in "qkv"
        )
        q, k = (
            rms_norm(each, w[norm], self._eps) if norm in w else each for each, norm in ((q, "q_norm"), (k, "k_norm"))
        )
        cos, sin = self._rotary(x, positions[None])
        out = running_pass().attend(layer, rotated(q, cos, sin), rotated(k, cos, sin), v, self._specs[layer])
        return linear(out.transpose(1, 2).reshape(n, -1), w["o"], w.get("o_bias"))

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last layer's output for the output matrix."""
        return rms_norm(hidden, self._weights["norm"], self._eps)


class Eagle3Head(EagleHead, RecurrentHead):
    """An EAGLE-3 head in a folder, of one layer."""

    shift = -1

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        if self.count != 1:
            raise ValueError(f"num_hidden_layers is {self.count} in {self.folder}; it must be 1")
        self._feed_normed = bool(self.config.get("norm_output"))

    def forward(
        self, layer: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        out = self.decoder_layer(layer, embeddings, hidden, positions)
        return self.final_norm(out) if self._feed_normed else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.matrix(hidden if self._feed_normed else self.final_norm(hidden))


def _aux_layers(config: Mapping[str, Any], count: int) -> tuple[Any, ...]:
    """Return the layers whose inputs are read, in a target of ``count`` layers, from either format. SpecForge numbers
    layers whose outputs it reads; only its default can be recognised."""
    inner, default = config.get("eagle_config"), (2, count // 2, count - 3)
    name = "eagle_aux_hidden_state_layer_ids"
    ids = tuple(config.get(name) or (inner.get(name) if isinstance(inner, dict) else None) or default)
    return default if ids == tuple(layer - 1 for layer in default) else ids


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is an EAGLE-3 head's."""
    names = config.get("architectures") or [""]
    return config.get("speculators_model_type") == "eagle3" or "Eagle3" in str(names[0]) or (
        "draft_vocab_size" in config and "speculators_model_type" not in config
    )  # fmt: skip
