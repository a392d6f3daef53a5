"""Sizes of a model of Llama's shape: its weights, keys and values, without norms (under 0.01 % of the weights)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

POSITIONS = 1 << 20  # of random models
SHAPES = {
    "llama-2-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": (80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": (80, 8192, 28672, 64, 8, 128256),
    "llama-68m": (2, 768, 3072, 12, 12, 32000),
    "smollm2-135m": (30, 576, 1536, 9, 3, 49152, None, True),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151_936, 64, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151_936, 128, True),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 151_936, 128, True),
    "qwen3.5-0.8b": (24, 1024, 3584, 8, 2, 248_320, 256, True),
    "qwen3.5-4b": (32, 2560, 9216, 16, 4, 248_320, 256, True),
    "qwen3.5-9b": (32, 4096, 12288, 16, 4, 248_320, 256),
    "gemma-4-e2b": (35, 1536, 6144, 8, 1, 262_144, 256, True),
}
"""Layers, hidden size, intermediate size, heads, KV heads, vocabulary; head size if not hidden / heads; tied tables.
Attention in all layers, no biases, no norms of heads, and one width of all networks are assumed."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model; raises ValueError if they do not fit together.

    Attributes:
        head: numbers of a head's key; by default hidden / heads.
        tied: whether the output matrix is the input embedding.
        weight_bytes, kv_bytes: of one weight, and of one number of a key or value.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int | None = None
    tied: bool = False
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.vocabulary)
        if min(sizes) < 1 or self.heads % self.kv_heads or (self.head is None and self.hidden % (2 * self.heads)):
            rule = "sizes must be positive, hidden a multiple of twice the heads, and heads a multiple of kv_heads"
            raise ValueError(f"a shape of {sizes} is not possible: {rule}")
        if self.head is not None and self.head < 1:
            raise ValueError(f"head is {self.head}; it must be at least 1")
        for name in ("weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        """Parse a name of ``SHAPES``, or layers,hidden,intermediate,heads,kv_heads,vocabulary."""
        if text in SHAPES:
            return cls(*SHAPES[text])
        parts = text.split(",")
        if len(parts) != 6 or not all(part.strip().isdigit() for part in parts):
            allowed = f"{', '.join(SHAPES)}, or layers,hidden,intermediate,heads,kv_heads,vocabulary"
            raise ValueError(f"a shape is {text!r}; give one of {allowed}")
        layers, hidden, intermediate, heads, kv_heads, vocabulary = map(int, parts)
        return cls(layers, hidden, intermediate, heads, kv_heads, vocabulary)

    @property
    def head_dim(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def table(self) -> int:
        """Weights of a table of the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def read_weights(self) -> int:
        """Weights that a pass reads: all but an input embedding, which is only looked up in."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.table

    @property
    def weights(self) -> int:
        return self.read_weights + (0 if self.tied else self.table)

    @property
    def stored_bytes(self) -> float:
        return self.weights * self.weight_bytes

    @property
    def pass_bytes(self) -> float:
        """Bytes of weights that a pass reads."""
        return self.read_weights * self.weight_bytes

    @property
    def token_kv_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def config(self, **more: Any) -> LlamaConfig:
        sizes = {
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied, "max_position_embeddings": POSITIONS,
        }  # fmt: skip
        return LlamaConfig(**sizes | more)


def random_model(shape: ModelShape, dtype: torch.dtype, device: str = "cpu", **config: Any) -> PreTrainedModel:
    """Return a decoder of this shape with seeded random weights; ``config`` has further entries."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(**config), dtype=dtype)
    return model.eval()
