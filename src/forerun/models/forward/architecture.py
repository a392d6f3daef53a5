"""Which models can run as a program of kernels, and the parts that the program needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.runtime.vector_ir import LANES, LINE, fused
from forerun.models.loading.stored_weights import StoredEmbedding, StoredLinear

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
"""Supported model types. They share one structure: root mean square norms, rotary halves, gated linear units."""
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}
KINDS = {torch.float32: 0, torch.bfloat16: 1}
CHANGING = frozenset({"dynamic", "longrope"})
"""Rotary scalings in which angles depend on the length of the text."""
SOURCES = ("transformers.", "torch.nn.modules.", StoredLinear.__module__)
"""Modules' classes must come from these packages."""
MATRICES = 7
"""Of a layer."""
ANGLES = 256
"""Positions whose angles are computed at once. Few enough that torch uses one thread, so that the bits are fixed."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer's modules; norms after a part may be missing."""

    attention: Any
    mlp: Any
    before: Any
    behind: Any
    before_mlp: Any
    behind_mlp: Any
    spec: AttentionSpec
    kind: str | None


def known(model: PreTrainedModel) -> bool:
    """Whether a program can be written for this model as it is now."""
    config = model.config
    if not fused() or config.model_type not in FAMILIES or model.dtype not in KINDS:
        return False
    if activation(config) not in ACTIVATIONS or getattr(config, "final_logit_softcapping", None):
        return False
    return _plain(model) and _fits(model) and not CHANGING & set(_scalings(model.model.rotary_emb))


def layers(model: PreTrainedModel) -> list[Layer]:
    """The parts of each layer."""
    decoder: Any = model.model
    return [_layer(each, model.config) for each in decoder.layers]


def angles(rotary: Any, kind: str | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all positions for one kind of layer, ``[count, half]`` each."""
    like, parts = torch.empty(0, dtype=torch.float32), []
    for first in range(0, count, ANGLES):
        positions = torch.arange(first, first + ANGLES)[None]
        parts.append(rotary(like, positions) if kind is None else rotary(like, positions, kind))
    cos, sin = (torch.cat(each, 1)[0, :count] for each in zip(*parts, strict=True))
    half = cos.shape[1] // 2
    return cos[:, :half].float().contiguous(), sin[:, :half].float().contiguous()


def activation(config: Any) -> str:
    """Name of the gates' activation."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def one(norm: Any) -> int:
    """The number that a norm adds to its weight: 1 for Gemma's, else 0."""
    return int("Gemma" in type(norm).__name__)


def eps(norm: Any) -> float:
    """The number that a norm adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def embed_scale(embedding: nn.Module) -> float:
    """The embedding's factor, rounded as the model rounds it."""
    factor = getattr(embedding, "embed_scale", 1.0)
    weight: Any = embedding.weight
    return float(torch.as_tensor(factor).to(weight.dtype if weight.is_floating_point() else torch.float32))


def hooked(module: nn.Module) -> bool:
    """Whether calling the module runs anything besides its class's ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _plain(model: PreTrainedModel) -> bool:
    """Whether every module is of an unchanged, known class, and all weights have one type."""
    if any(hooked(module) or not type(module).__module__.startswith(SOURCES) for module in model.modules()):
        return False
    blocks = {module.weight for module in model.modules() if isinstance(module, StoredLinear | StoredEmbedding)}
    return all(
        weight.dtype == (torch.uint8 if weight in blocks else model.dtype)
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        for weight in model.parameters()
    )


def _fits(model: PreTrainedModel) -> bool:
    """Whether rows are whole vectors, all layers are alike, and either all matrices are plain linear layers or all are
    stored ones."""
    whole = LINE // model.dtype.itemsize
    linears: list[Any] = [*_linears(model)]
    sizes = [(module.in_features, module.out_features) for module in linears[:-1]]
    kind = StoredLinear if model.dtype == torch.float32 and type(model.lm_head) is StoredLinear else nn.Linear
    heads = {part.head_dim for part in (layer.attention for layer in layers(model))}
    head: Any = model.lm_head
    return (
        all(type(module) is kind and module.in_features % whole == 0 for module in linears)
        and sizes == sizes[:MATRICES] * (len(sizes) // MATRICES)
        and len(heads) == 1
        and not any(dim % LANES for dim in heads)
        and head.bias is None
    )


def _linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    for layer in layers(model):
        part, mlp = layer.attention, layer.mlp
        yield from (part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield model.lm_head


def _scalings(rotary: Any) -> list[str]:
    """Names of the rotary scalings, per kind of layer."""
    return list(rotary.rope_type.values()) if isinstance(rotary.rope_type, dict) else [rotary.rope_type]


def _layer(layer: Any, config: Any) -> Layer:
    part = layer.self_attn
    own = config.sliding_window if config.model_type == "mistral" else None
    spec = AttentionSpec(part.scaling, getattr(part, "sliding_window", own))  # none of them caps scores
    kind = part.layer_type if config.model_type == "gemma3_text" else None
    if hasattr(layer, "pre_feedforward_layernorm"):
        norms = (layer.post_attention_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm)
    else:
        norms = (None, layer.post_attention_layernorm, None)
    return Layer(part, layer.mlp, layer.input_layernorm, *norms, spec, kind)
