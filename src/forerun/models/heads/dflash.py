"""DFlash (2026): a few decoder layers that fill in a block of tokens at once, from the target's hidden states.

The block is the sequence's last token followed by masks. Its tokens attend to each other, and to keys and values that
each layer projects from the target's states (several layers' concatenated and narrowed by ``fc``). Masks predict
independently, so all nodes of a level have the same children. Layers are Qwen 3's; embeddings and output matrix are the
target's unless the file has some. Supported are the authors' format (z-lab) and that of ``speculators``, which nests
the layers' configuration, counts layers from the embedding, and may have a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from forerun.kernels.attention.attention import AttentionSpec, attend
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.cache import Cache
from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.block_head import BlockHead
from forerun.models.heads.entries import ROTARY_FIELDS, check_entries, check_layers, config_of, count_in, windows
from forerun.models.heads.head import Growth, HeadSequence
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.matrices import linear, placed, weight_beside
from forerun.models.heads.norms_and_rotary import rms_norm, rotated
from forerun.models.heads.shortlist import OutputMatrix, drafting
from forerun.models.heads.vocabulary import input_embeddings, known_tokens, own_matrix

MASKED_BLOCK_TOKENS = 16
DFLASH_ENTRIES = frozenset(
    {"aux_hidden_state_layer_ids", "block_size", "causal", "dflash_config", "final_logit_softcapping",
     "input_embedding_scale", "is_causal", "mask_token_id", "output_multiplier", "sample_from_anchor",
     "sliding_window_non_causal", "target_layer_ids"}
)  # fmt: skip


class DFlashHead(BlockHead):
    """A DFlash head in a folder with ``config.json`` and safetensors files; raises ValueError for what does not fit."""

    kind = "DFlash"
    architectures = frozenset({"DFlashDraftModel", "DFlashSpeculator"})
    read_entries = DFLASH_ENTRIES
    single_valued: Mapping[str, Any] = {"attention_mode": "gqa", "projector_type": "dflash"}
    looked_up: frozenset[str] = frozenset()
    """Matrices that are only looked up, never multiplied with."""
    takes_shortlists = True
    from_anchor = False
    """Default of whether the block's first row predicts the next token."""
    non_causal_windows = False
    """For ``speculators``, the default of whether tokens of a block attend to later ones in windowed layers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = config_of(self.folder)
        inner, more = self.config.get("transformer_layer_config"), self.config.get("dflash_config")
        self._layer = inner if isinstance(inner, dict) else self.config
        self._parts = [part for part in (more, self.config, inner) if isinstance(part, dict)]
        for part in self._parts:
            check_entries(part, self.read_entries, self.single_valued, self.kind, self.folder)
        named = set(self.config.get("architectures") or ())
        if named - self.architectures:
            raise ValueError(
                f"architectures is {sorted(named)} in {self.folder / 'config.json'}; "
                f"a head of {self.kind} is one of {sorted(self.architectures)}"
            )
        self._size, heads, self._inner, self._count = (
            count_in(self._layer, name, self.folder)
            for name in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
        )
        self._heads, self._kv_heads = heads, int(self._layer.get("num_key_value_heads") or heads)
        self._dim = int(self._layer.get("head_dim") or self._size // heads)
        self._eps = float(self._layer.get("rms_norm_eps", 1e-6))
        self._act = ACT2FN[self._layer.get("hidden_act", "silu")]
        self._block = int(self._value("block_size", MASKED_BLOCK_TOKENS))
        self._first = 0 if self._value("sample_from_anchor", self.from_anchor) else 1
        if self._block < 2:
            raise ValueError(f"block_size is {self._block} in {self.folder}; it must be at least 2")
        self.levels = self._block - self._first
        self._windows = windows(self._layer, self._count, self.folder)
        self._causal = self._find_causal()

    def _value(self, name: str, default: Any = None) -> Any:
        """Look an entry up in ``dflash_config``, the configuration, and the layers' configuration, in this order."""
        return next((part[name] for part in self._parts if part.get(name) is not None), default)

    def _find_causal(self) -> list[bool]:
        """Return whether tokens of a block attend only to earlier ones, by layer."""
        stated, sliding = self._value("is_causal", self._value("causal")), [each is not None for each in self._windows]
        if "speculators_model_type" in self.config:
            non_causal = self._value("sliding_window_non_causal", self.non_causal_windows)
            return [each and not non_causal for each in sliding]
        return sliding if stated is None else [bool(stated)] * self._count

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        config = text_config(target.model)
        self._target, count, wide = target, int(config.num_hidden_layers), int(config.hidden_size)
        ids, after = self._value("aux_hidden_state_layer_ids"), self._value("target_layer_ids") or ()
        plus = [each + 1 if isinstance(each, int) else each for each in after]
        self.layers = check_layers(ids or plus, count, "target_layer_ids (from 1)", self.folder)
        if self._size != wide:
            raise ValueError(
                f"the {self.kind} head in {self.folder} expects hidden size {self._size}, and the target's is {wide}"
            )
        stated = self._layer.get("vocab_size", target.vocabulary)
        if stated != target.vocabulary:
            raise ValueError(
                f"the {self.kind} head in {self.folder} is for a vocabulary of {stated} tokens, "
                f"and the target has {target.vocabulary}"
            )
        mask = self._value("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < target.vocabulary:
            raise ValueError(f"mask_token_id is {mask!r} in {self.folder}; it must be a token of the target")
        self._mask, self._draft_vocabulary = mask, int(self.config.get("draft_vocab_size") or target.vocabulary)
        self.token_bytes = 2 * self._count * self._kv_heads * self._dim * target.model.dtype.itemsize
        self._load(HeadFile(self.folder, self.kind), target)

    def _load(self, file: HeadFile, target: Scorer) -> None:
        size, model = self._size, target.model
        self._weights = {
            name: (placed if name in self.looked_up else weight_beside)(target, file.take(name, *shape))
            for name, shape in self._shapes().items()
        }
        theirs, ins, outs = (target.vocabulary, size), model.get_input_embeddings(), model.get_output_embeddings()
        if (own := own_matrix(file, "embed_tokens.weight", theirs, theirs, ins)) is not None:
            self._weights["embed_tokens.weight"] = placed(target, own)
        own = own_matrix(file, "lm_head.weight", (self._draft_vocabulary, size), theirs, outs)
        self.matrix = OutputMatrix.of_target(target) if own is None else OutputMatrix.of(weight_beside(target, own))
        tokens = known_tokens(file, self._draft_vocabulary, target.vocabulary, self.folder)
        self.tokens = tokens if tokens is None else tokens.to(target.device)
        self.output = self.matrix if self.tokens is None and self.takes_shortlists else None
        fields = {name: value for name, value in self._layer.items() if name in ROTARY_FIELDS}
        self._rotary = Qwen3RotaryEmbedding(Qwen3Config(**fields, head_dim=self._dim)).to(target.device)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size = self._size
        names: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, len(self.layers) * size), "hidden_norm.weight": (size,), "norm.weight": (size,)
        }  # fmt: skip
        out, kv = self._heads * self._dim, self._kv_heads * self._dim
        shapes = {"q": (out, size), "k": (kv, size), "v": (kv, size), "o": (size, out)}
        for number in range(self._count):
            at = f"layers.{number}."
            names |= {f"{at}{name}.weight": (size,) for name in ("input_layernorm", "post_attention_layernorm")}
            names |= {f"{at}self_attn.{name}.weight": (self._dim,) for name in ("q_norm", "k_norm")}
            names |= {f"{at}self_attn.{part}_proj.weight": shape for part, shape in shapes.items()}
            if self._layer.get("attention_bias"):
                names |= {f"{at}self_attn.{part}_proj.bias": shape[:1] for part, shape in shapes.items()}
            names |= {f"{at}mlp.{part}_proj.weight": (self._inner, size) for part in ("gate", "up")}
            names[f"{at}mlp.down_proj.weight"] = size, self._inner
        return names

    def open(self, cache: Cache) -> HeadSequence:
        return HeadSequence(self._count, cache)

    def read(self, sequences: Sequence[HeadSequence]) -> None:
        for sequence in sequences:
            if sequence.pending and sequence.next is not None:
                states = torch.cat([states for states, _ in sequence.pending])
                with Ordered():
                    self._read(sequence, states, sequence.next - len(states))
                sequence.pending.clear()

    def _read(self, sequence: HeadSequence, states: torch.Tensor, first: int) -> None:
        w, places = self._weights, torch.arange(first, first + len(states), device=states.device)
        features = rms_norm(
            linear(states.to(w["norm.weight"].dtype), w["fc.weight"]), w["hidden_norm.weight"], self._eps
        )
        angles = self._rotary(features, places[None])
        for layer in range(self._count):
            sequence.store(layer, *self._keys(layer, features, angles), sequence.lengths[layer])
            sequence.lengths[layer] += len(states)

    def _keys(self, layer: int, x: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys = rms_norm(self._part(layer, "k", x), self._weights[f"layers.{layer}.self_attn.k_norm.weight"], self._eps)
        return rotated(keys, *angles), self._part(layer, "v", x)

    def _part(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.self_attn.{part}_proj."
        made = linear(x, self._weights[f"{name}weight"], self._weights.get(f"{name}bias"))
        return made.view(1, len(x), -1, self._dim).transpose(1, 2)

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        hidden = self._fill(sequences)
        with Ordered(), drafting([sequence.shortlist for sequence in sequences], [self.levels] * len(sequences)):
            logits = self._logits(hidden.flatten(0, 1)).view(len(sequences), self.levels, -1)
        return [Growth(sequence, own) for sequence, own in zip(sequences, logits, strict=True)], logits[:, 0]

    def _fill(self, sequences: Sequence[HeadSequence]) -> torch.Tensor:
        """Run each sequence's block through all layers and the final norm, ``[rows, levels, hidden]``."""
        self.read(sequences)
        device = self._target.device
        ids = torch.tensor(
            [[int(sequence.last), *[self._mask] * (self._block - 1)] for sequence in sequences], device=device
        )
        places = torch.cat([torch.arange(self._block) + (sequence.next or 0) for sequence in sequences]).to(device)
        with Ordered():
            x = self._embed(ids.flatten())
            angles = self._rotary(x, places[None])
            for layer in range(self._count):
                x = self._decoder_layer(layer, x, sequences, angles)
            x = rms_norm(x, self._weights["norm.weight"], self._eps)
        return x.view(len(sequences), self._block, -1)[:, self._first :]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self._weights.get("embed_tokens.weight")
        embedded = input_embeddings(self._target, ids) if own is None else embedding(ids, own)
        return embedded.to(self._weights["norm.weight"].dtype) * float(self._value("input_embedding_scale", 1.0))

    def _decoder_layer(
        self, layer: int, x: torch.Tensor, sequences: Sequence[HeadSequence], angles: Any
    ) -> torch.Tensor:
        w, eps, at = self._weights, self._eps, f"layers.{layer}."
        x = x + self._attention(layer, rms_norm(x, w[f"{at}input_layernorm.weight"], eps), sequences, angles)
        return x + self._mlp(layer, rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps))

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        w, at = self._weights, f"layers.{layer}.mlp."
        gate = self._act(linear(x, w[f"{at}gate_proj.weight"])) * linear(x, w[f"{at}up_proj.weight"])
        return linear(gate, w[f"{at}down_proj.weight"])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.matrix(hidden) * float(self._value("output_multiplier", 1.0))
        cap = self._value("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits

    def _attention(self, layer: int, x: torch.Tensor, sequences: Sequence[HeadSequence], angles: Any) -> torch.Tensor:
        norm = self._weights[f"layers.{layer}.self_attn.q_norm.weight"]
        q = rotated(rms_norm(self._part(layer, "q", x), norm, self._eps), *angles)
        keys, values = self._keys(layer, x, angles)
        parts, spec = [torch.split(each, self._block, 2) for each in (q, keys, values)], AttentionSpec(self._dim**-0.5)
        outs = []
        for sequence, own, k, v in zip(sequences, *parts, strict=True):
            rows = sequence.store(layer, k, v, sequence.lengths[layer])
            outs.append(attend(own, rows[0], rows[1], spec, self._bias(layer, sequence.lengths[layer], own)).out)
        out = torch.cat(outs, 2).transpose(1, 2).reshape(len(x), -1)
        name = f"layers.{layer}.self_attn.o_proj."
        return linear(out, self._weights[f"{name}weight"], self._weights.get(f"{name}bias"))

    def _bias(self, layer: int, held: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a layer with a window or causal attention; None for others."""
        window, causal = self._windows[layer], self._causal[layer]
        if window is None and not causal:
            return None
        distance = torch.arange(held, held + self._block)[:, None] - torch.arange(held + self._block)[None]
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen &= distance.abs() < window
        return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, -torch.inf).to(like.device)


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a DFlash head's."""
    return "dflash_config" in config or "DFlash" in str(config.get("architectures")) or (
        config.get("speculators_model_type") == "dflash"
    )  # fmt: skip
