"""DFlash (2026): a few decoder layers that fill in a block of tokens at once, over the target's hidden states.

The block is the text's last token and masks behind it. Its tokens see each other, and keys and values that each layer
makes of the target's states, several layers' side by side and made narrower by ``fc``. What leaves the block at a mask
says which token is likely there, whatever stands at the others. So a tree has the same tokens behind all nodes of a
level. Read is the authors' form (z-lab): its layers are those of Qwen 3, embeddings and the head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from forerun.kernels.attention.attention import AttentionSpec, attend
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.models.forward.architecture import text_config
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.head import (
    ROTARY_FIELDS,
    Growth,
    Head,
    HeadFile,
    HeadText,
    check_layers,
    config_of,
    count_in,
    input_embeddings,
    rms_norm,
    rotated,
)
from forerun.models.heads.matrices import linear, weight_beside
from forerun.models.heads.shortlist import OutputMatrix, drafting

MASKED_BLOCK_TOKENS = 16
"""Tokens of a block, where a configuration does not say."""


class DFlashHead(Head):
    """A head in a folder.

    Args:
        folder: with ``config.json`` and safetensors files.

    Raises:
        ValueError: if they are not those of such a head; says which part.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = config_of(self.folder)
        if "DFlash2" in str(self.config.get("architectures")) or "speculators_model_type" in self.config:
            raise ValueError(
                f"{self.folder} holds a further form of DFlash; read is the one of z-lab's DFlashDraftModel"
            )
        self._size, heads, self._inner, self._count = (
            count_in(self.config, name, self.folder)
            for name in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
        )
        self._heads, self._kv_heads = heads, int(self.config.get("num_key_value_heads") or heads)
        self._dim = int(self.config.get("head_dim") or self._size // heads)
        self._eps = float(self.config.get("rms_norm_eps", 1e-6))
        self._act = ACT2FN[self.config.get("hidden_act", "silu")]
        self._block = int(self._value("block_size", MASKED_BLOCK_TOKENS))
        if self._block < 2:
            raise ValueError(f"block_size is {self._block} in {self.folder}; it must be at least 2")
        self.levels = self._block - 1

    def _value(self, name: str, default: Any = None) -> Any:
        """An entry of ``dflash_config``, or of the configuration."""
        inner = self.config.get("dflash_config")
        own = inner if isinstance(inner, dict) else {}
        return own.get(name, self.config.get(name, default))

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        config = text_config(target.model)
        self._target, count, wide = target, int(config.num_hidden_layers), int(config.hidden_size)
        ids = self._value("target_layer_ids") or ()
        plus = [each + 1 if isinstance(each, int) else each for each in ids]
        self.layers = check_layers(plus, count, "target_layer_ids (from 1)", self.folder)
        if self._size != wide:
            raise ValueError(
                f"the DFlash head in {self.folder} reads hidden states of {self._size} numbers, "
                f"and the target has {wide}"
            )
        stated = self.config.get("vocab_size", target.vocabulary)
        if stated != target.vocabulary:
            raise ValueError(
                f"the DFlash head in {self.folder} is for a vocabulary of {stated} tokens, "
                f"and the target has {target.vocabulary}"
            )
        mask = self._value("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < target.vocabulary:
            raise ValueError(f"mask_token_id is {mask!r} in {self.folder}; it must be a token of the target")
        self._mask = mask
        self.token_bytes = 2 * self._count * self._kv_heads * self._dim * target.model.dtype.itemsize
        self._load(target)
        self._matrix = self.output = OutputMatrix.of_target(target)

    def _load(self, target: Scorer) -> None:
        """Read all weights, in the target's type."""
        file, size = HeadFile(self.folder, "DFlash"), self._size
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
            if self.config.get("attention_bias"):
                names |= {f"{at}self_attn.{part}_proj.bias": shape[:1] for part, shape in shapes.items()}
            names |= {f"{at}mlp.{part}_proj.weight": (self._inner, size) for part in ("gate", "up")}
            names[f"{at}mlp.down_proj.weight"] = size, self._inner
        self._weights = {name: weight_beside(target, file.take(name, *shape)) for name, shape in names.items()}
        fields = {name: value for name, value in self.config.items() if name in ROTARY_FIELDS}
        self._rotary = Qwen3RotaryEmbedding(Qwen3Config(**fields, head_dim=self._dim)).to(target.device)
        kinds = self.config.get("layer_types") or ["full_attention"] * self._count
        sliding, causal = [kind == "sliding_attention" for kind in kinds], self.config.get("is_causal")
        self._causal = sliding if causal is None else [bool(causal)] * self._count
        self._windows = [self.config.get("sliding_window") if each else None for each in sliding]

    def text(self) -> HeadText:
        return HeadText(self._count)

    def read(self, texts: Sequence[HeadText]) -> None:
        for text in texts:
            if text.pending and text.next is not None:
                states = torch.cat([states for states, _ in text.pending])
                with Ordered():
                    self._read(text, states, text.next - len(states))
                text.pending.clear()

    def _read(self, text: HeadText, states: torch.Tensor, first: int) -> None:
        """Keep each layer's keys and values of the target's states ``[n, layers * hidden]``."""
        w, places = self._weights, torch.arange(first, first + len(states), device=states.device)
        features = rms_norm(
            linear(states.to(w["norm.weight"].dtype), w["fc.weight"]), w["hidden_norm.weight"], self._eps
        )
        angles = self._rotary(features, places[None])
        for layer in range(self._count):
            text.store(layer, *self._keys(layer, features, angles), text.lengths[layer])
            text.lengths[layer] += len(states)

    def _keys(self, layer: int, x: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[1, Hkv, n, d]`` of rows ``[n, hidden]``."""
        keys = rms_norm(self._part(layer, "k", x), self._weights[f"layers.{layer}.self_attn.k_norm.weight"], self._eps)
        return rotated(keys, *angles), self._part(layer, "v", x)

    def _part(self, layer: int, part: str, x: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.self_attn.{part}_proj."
        made = linear(x, self._weights[f"{name}weight"], self._weights.get(f"{name}bias"))
        return made.view(1, len(x), -1, self._dim).transpose(1, 2)

    def start(self, texts: Sequence[HeadText]) -> tuple[list[Growth], torch.Tensor]:
        self.read(texts)
        device = self._target.device
        anchors = [int(text.last) for text in texts]
        ids = torch.tensor([[anchor, *[self._mask] * self.levels] for anchor in anchors], device=device)
        places = torch.cat([torch.arange(self._block) + (text.next or 0) for text in texts]).to(device)
        with Ordered():
            logits = self._fill(texts, ids.flatten(), places).view(len(texts), self._block, -1)
        return [Growth(text, own[1:]) for text, own in zip(texts, logits, strict=True)], logits[:, 1]

    def _fill(self, texts: Sequence[HeadText], ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits at all tokens of the texts' blocks, ``[rows * block, D]``."""
        w, eps = self._weights, self._eps
        x = input_embeddings(self._target, ids).to(w["norm.weight"].dtype) * float(
            self._value("input_embedding_scale", 1.0)
        )
        angles = self._rotary(x, places[None])
        for layer in range(self._count):
            at = f"layers.{layer}."
            x = x + self._attention(layer, rms_norm(x, w[f"{at}input_layernorm.weight"], eps), texts, angles)
            y = rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
            gate = self._act(linear(y, w[f"{at}mlp.gate_proj.weight"])) * linear(y, w[f"{at}mlp.up_proj.weight"])
            x = x + linear(gate, w[f"{at}mlp.down_proj.weight"])
        with drafting([text.shortlist for text in texts], [self._block] * len(texts)):
            logits = self._matrix(rms_norm(x, w["norm.weight"], eps))
        logits = logits * float(self._value("output_multiplier", 1.0))
        cap = self._value("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits

    def _attention(self, layer: int, x: torch.Tensor, texts: Sequence[HeadText], angles: Any) -> torch.Tensor:
        norm = self._weights[f"layers.{layer}.self_attn.q_norm.weight"]
        q = rotated(rms_norm(self._part(layer, "q", x), norm, self._eps), *angles)
        keys, values = self._keys(layer, x, angles)
        parts, spec = [torch.split(each, self._block, 2) for each in (q, keys, values)], AttentionSpec(self._dim**-0.5)
        outs = []
        for text, own, k, v in zip(texts, *parts, strict=True):
            whole = text.store(layer, k, v, text.lengths[layer])
            outs.append(attend(own, whole[0], whole[1], spec, self._bias(layer, text.lengths[layer], own)).out)
        out = torch.cat(outs, 2).transpose(1, 2).reshape(len(x), -1)
        name = f"layers.{layer}.self_attn.o_proj."
        return linear(out, self._weights[f"{name}weight"], self._weights.get(f"{name}bias"))

    def _bias(self, layer: int, held: int, like: torch.Tensor) -> torch.Tensor | None:
        """Mask of a layer whose tokens do not see all others; None if they do."""
        window, causal = self._windows[layer], self._causal[layer]
        if window is None and not causal:
            return None
        behind = torch.arange(held, held + self._block)[:, None] - torch.arange(held + self._block)[None]
        seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        if window is not None:
            seen &= behind.abs() < window
        return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, -torch.inf).to(like.device)

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        parts = []
        for growth, above in zip(growths, parents, strict=True):
            depth, rows = growth.add(above), growth.hidden
            row = rows[depth] if depth < len(rows) else torch.zeros_like(rows[0])
            parts.append(row.expand(len(above), -1))
        return torch.cat(parts)


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a DFlash head."""
    return "dflash_config" in config or "DFlash" in str(config.get("architectures")) or (
        config.get("speculators_model_type") == "dflash"
    )  # fmt: skip
