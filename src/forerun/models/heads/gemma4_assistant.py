"""Gemma 4's assistants (Google, 2026): a few layers with queries only, which attend to the target's keys and values.

The input is the target's embedding of the last token, and its last hidden state at the token before; after a drafted
token, the assistant's output replaces that state. Each layer attends to the cache of the target's last layer of its
kind, ``full_attention`` or ``sliding_attention``. The position stays that of the sequence's last token, and drafted
tokens have no keys. So a node depends only on its parent's output and its token.

Logits cover all tokens, or those in the likeliest clusters. The computation is transformers' ``gemma4_assistant`` with
``SinglePositionMultiTokenCandidateGenerator`` over the keys of committed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import linear
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, attend
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.cache import Cache
from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.entries import config_of
from forerun.models.heads.head import Growth, Head, HeadSequence
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.norms_and_rotary import rms_norm, rotated

MODEL_TYPES = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
SLIDING = "sliding_attention"
NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
UNSCALED = AttentionSpec(1.0)


class Gemma4AssistantHead(Head):
    """An assistant in a folder as transformers saves them; raises ValueError for what does not fit."""

    token_bytes = 0

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not is_gemma4_assistant(given := config_of(self.folder)):
            raise ValueError(
                f"model_type is {given.get('model_type')!r} in {self.folder}; allowed are {sorted(MODEL_TYPES)}"
            )
        try:
            self._config = AutoConfig.from_pretrained(self.folder)
        except Exception as error:
            raise ValueError(f"config.json in {self.folder} is not a Gemma 4 assistant's: {error}") from error
        self._own: Any = self._config.get_text_config()
        self._kinds: list[str] = list(self._own.layer_types)
        self._dims = [int(layer.head_dim) for layer in self._own.per_layer_config]
        self._eps, self._act = float(self._own.rms_norm_eps), ACT2FN[self._own.hidden_activation]
        self._centroids = int(self._config.num_centroids) if self._config.use_ordered_embeddings else 0
        self._likely, tokens = int(self._config.centroid_intermediate_top_k), int(self._own.vocab_size)
        if self._centroids and (tokens % self._centroids or not 0 < self._likely <= self._centroids):
            raise ValueError(
                f"num_centroids is {self._centroids} and centroid_intermediate_top_k {self._likely} in {self.folder}; "
                f"the first must divide the vocabulary of {tokens} tokens, the second be between 1 and the first"
            )

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        theirs = text_config(target.model)
        self._target, self.layers = target, (int(theirs.num_hidden_layers),)
        self._require("hidden size", self._config.backbone_hidden_size, theirs.hidden_size)
        self._require("vocabulary", self._own.vocab_size, target.vocabulary)
        self._sources = {kind: self._source(kind, theirs, target) for kind in dict.fromkeys(self._kinds)}
        self._load(target)

    def _require(self, what: str, own: Any, theirs: Any) -> None:
        if own != theirs:
            raise ValueError(
                f"the Gemma 4 assistant in {self.folder} is for a target whose {what} is {own}; this one's is {theirs}"
            )

    def _source(self, kind: str, theirs: Any, target: Scorer) -> int:
        """Return the target's last layer of a kind that stores keys and values; raise ValueError if none fits."""
        count = int(theirs.num_hidden_layers) - int(getattr(theirs, "num_kv_shared_layers", None) or 0)
        kinds = list(getattr(theirs, "layer_types", None) or ())[:count]
        if kind not in kinds:
            raise ValueError(
                f"the Gemma 4 assistant in {self.folder} reads keys of {kind} layers, "
                f"and the target's layers are {sorted(set(kinds)) or 'of no named kind'}"
            )
        source = count - 1 - kinds[::-1].index(kind)
        held, layer = target.kv.layers[source], self._own.per_layer_config[self._kinds.index(kind)]
        own = int(layer.num_key_value_heads), int(layer.head_dim), int(layer.head_dim)
        self._require(f"(KV heads, key size, value size) in {kind} layers", own, (held.heads, held.dim, held.out_dim))
        if kind == SLIDING:
            self._require("sliding window", self._own.sliding_window, theirs.sliding_window)
        return source

    def _load(self, target: Scorer) -> None:
        file, dtype = HeadFile(self.folder, "Gemma 4 assistant"), target.model.dtype
        self._weights = {
            name: file.take(name, *shape).to(target.device, dtype).contiguous()
            for name, shape in self._shapes().items()
        }
        tied = self._config.tie_word_embeddings
        self._head = self._weights["embed_tokens.weight" if tied else "lm_head.weight"]
        if self._centroids:
            tokens = file.take("masked_embedding.token_ordering", len(self._head)).to(target.device, torch.int64)
            if not torch.equal(tokens.sort().values, torch.arange(len(tokens), device=tokens.device)):
                raise ValueError(
                    f"masked_embedding.token_ordering in {self.folder} does not name each of {len(tokens)} tokens once"
                )
            self._clusters = tokens.view(self._centroids, -1)
        self._rotary = Gemma4TextRotaryEmbedding(self._own).to(target.device)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        own, wide = self._own, int(self._config.backbone_hidden_size)
        size, inner = int(own.hidden_size), int(own.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {
            "pre_projection.weight": (size, 2 * wide), "post_projection.weight": (wide, size), "norm.weight": (size,),
            "embed_tokens.weight" if self._config.tie_word_embeddings else "lm_head.weight": (own.vocab_size, size),
        }  # fmt: skip
        if self._centroids:
            shapes["masked_embedding.centroids.weight"] = self._centroids, size
        for number, dim in enumerate(self._dims):
            at, out = f"layers.{number}.", own.num_attention_heads * dim
            shapes |= {f"{at}{name}.weight": (size,) for name in NORMS}
            for part, shape in {"q": (out, size), "o": (size, out)}.items():
                shapes[f"{at}self_attn.{part}_proj.weight"] = shape
                if own.attention_bias:
                    shapes[f"{at}self_attn.{part}_proj.bias"] = shape[:1]
            shapes |= {f"{at}self_attn.q_norm.weight": (dim,), f"{at}layer_scalar": (1,)}
            shapes |= {f"{at}mlp.{part}_proj.weight": (inner, size) for part in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = size, inner
        return shapes

    def open(self, cache: Cache) -> HeadSequence:
        if cache.full is None:
            raise ValueError(
                f"a Gemma 4 assistant reads all of the target's keys, and a {type(cache).__name__} lacks some"
            )
        return HeadSequence(0, cache)

    def record(self, sequence: HeadSequence, tokens: IntArray, start: int, states: torch.Tensor) -> None:
        end = min(start + len(states), len(tokens) - 1)
        if end > start:
            sequence.hidden = states[end - start - 1 : end - start].clone()
            sequence.next, sequence.last = end, int(tokens[end])

    def read(self, sequences: Sequence[HeadSequence]) -> None:
        pass

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        rounds = [_Round(sequence, self._visible(sequence)) for sequence in sequences]
        states = torch.cat([sequence.hidden for sequence in sequences if sequence.hidden is not None])
        return [*rounds], self._score(rounds, [[sequence.last] for sequence in sequences], states)

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        states = torch.cat([growth.hidden[list(above)] for growth, above in zip(growths, parents, strict=True)])
        for growth, above in zip(growths, parents, strict=True):
            growth.add(above)
        return self._score(cast("Sequence[_Round]", growths), tokens, states)

    def _visible(self, sequence: HeadSequence) -> dict[str, Rows]:
        """Return the keys and values that all queries of a round attend to, ``[1, Hkv, m, d]``, by kind of layer. The
        window is transformers': one token longer than the target's at this position."""
        cache, end = sequence.cache.full, sequence.next or 0
        assert cache is not None
        first = {SLIDING: max(0, end - 1 - int(self._own.sliding_window))}
        return {kind: cache.read(source, first.get(kind, 0), end) for kind, source in self._sources.items()}

    def _score(self, rounds: Sequence[_Round], tokens: Sequence[Sequence[int]], states: torch.Tensor) -> torch.Tensor:
        """Add nodes to trees after states ``[n, backbone hidden]``; return logits after each, ``[n, V]``."""
        w, counts, device = self._weights, [len(own) for own in tokens], self._target.device
        ids = torch.tensor([token for own in tokens for token in own], device=device)
        ends = [each.sequence.next for each, count in zip(rounds, counts, strict=True) for _ in range(count)]
        places, embed = torch.tensor([ends], device=device), self._target.model.get_input_embeddings()
        with Ordered():
            inputs = torch.cat([embed(ids).to(self._head.dtype), states.to(self._head.dtype)], -1)
            x = linear(inputs, w["pre_projection.weight"])
            angles = {kind: self._rotary(x, places, kind) for kind in self._sources}
            for number, kind in enumerate(self._kinds):
                x = self._layer(number, x, [each.keys[kind] for each in rounds], counts, angles[kind])
            x = rms_norm(x, w["norm.weight"], self._eps)
            left, logits = linear(x, w["post_projection.weight"]), self._logits(x)
        for each, part in zip(rounds, torch.split(left, counts), strict=True):
            each.hidden = torch.cat([each.hidden, part])
        return logits

    def _layer(
        self, number: int, x: torch.Tensor, keys: Sequence[Rows], counts: Sequence[int], angles: Any
    ) -> torch.Tensor:
        w, eps, at = self._weights, self._eps, f"layers.{number}."
        y = self._attention(number, rms_norm(x, w[f"{at}input_layernorm.weight"], eps), keys, counts, angles)
        x = x + rms_norm(y, w[f"{at}post_attention_layernorm.weight"], eps)
        y = rms_norm(x, w[f"{at}pre_feedforward_layernorm.weight"], eps)
        y = self._act(linear(y, w[f"{at}mlp.gate_proj.weight"])) * linear(y, w[f"{at}mlp.up_proj.weight"])
        y = linear(y, w[f"{at}mlp.down_proj.weight"])
        return (x + rms_norm(y, w[f"{at}post_feedforward_layernorm.weight"], eps)) * w[f"{at}layer_scalar"]

    def _attention(
        self, number: int, x: torch.Tensor, keys: Sequence[Rows], counts: Sequence[int], angles: Any
    ) -> torch.Tensor:
        w, at = self._weights, f"layers.{number}.self_attn."
        q = linear(x, w[f"{at}q_proj.weight"], w.get(f"{at}q_proj.bias")).view(1, len(x), -1, self._dims[number])
        q = rotated(rms_norm(q.transpose(1, 2), w[f"{at}q_norm.weight"], self._eps), *angles)
        split = torch.split(q, list(counts), 2)
        outs = [attend(own, rows[0], rows[1], UNSCALED).out for own, rows in zip(split, keys, strict=True)]
        out = torch.cat(outs, 2).transpose(1, 2).reshape(len(x), -1)
        return linear(out, w[f"{at}o_proj.weight"], w.get(f"{at}o_proj.bias"))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[n, V]``; minus infinity outside the likeliest clusters. transformers has the least logit
        minus 1 there, which would give these many tokens a share of the probability."""
        if not self._centroids:
            return linear(x, self._head)
        scores = linear(x, self._weights["masked_embedding.centroids.weight"])
        tokens = self._clusters[scores.topk(self._likely).indices].flatten(1)
        chosen = torch.bmm(self._head[tokens], x[:, :, None])[:, :, 0]
        return x.new_full((len(x), len(self._head)), -torch.inf).scatter_(1, tokens, chosen)


class _Round(Growth):
    def __init__(self, sequence: HeadSequence, keys: Mapping[str, Rows]) -> None:
        assert sequence.hidden is not None
        super().__init__(sequence, sequence.hidden[:0])
        self.keys = keys


def is_gemma4_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a Gemma 4 assistant's."""
    return config.get("model_type") in MODEL_TYPES
