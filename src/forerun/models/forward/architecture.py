"""Describe the layers of models that can run as a program of kernels.

A description names matrices, norms and numbers. So another family needs a few lines and no kernel, if its layers are
attention or a short convolution, and a gated linear unit, on a residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.linear.rowwise import GELU, SILU
from forerun.kernels.linear.weight_matrix import Weights, plain
from forerun.kernels.runtime.vector_ir import LANES, LINE, fused
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.weight_watch import SOURCES, added_code

FAMILIES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "olmo2", "olmo3"),
        *("gemma", "gemma2", "gemma3_text", "lfm2"),
    }
)
"""Supported types of text models: root mean square norms, rotary halves, gated linear units."""
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}
PROGRAM_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CAPPED_LOGITS = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
"""Models that cap their logits; others may have a cap in their configuration and ignore it."""
CHANGING = frozenset({"dynamic", "longrope"})
"""Rotary scalings whose angles depend on the sequence's length; ``longrope``'s only beyond ``position_limit``."""
STORED = "stored"
"""Name of the type of quantised weights in a file's format (``stored_weights.py``)."""
STORED_BY_FLOATS = "stored, float32 activations"
ANGLES_CHUNK = 256
"""Positions whose angles are computed at once; few enough for one thread in torch, so that the bits are fixed."""


@dataclass(frozen=True)
class MatrixRows:
    """Rows ``first`` to ``first + count`` of a linear layer: a complete matrix, or one of several."""

    module: Any
    first: int
    count: int

    @property
    def weight(self) -> torch.Tensor:
        """The weights, ``[count, K]``."""
        return self.module.weight.detach()[self.first : self.first + self.count]  # type: ignore[no-any-return]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.module.bias
        return None if bias is None else bias.detach()[self.first : self.first + self.count]

    @property
    def weights(self) -> Weights:
        """The rows in the form that kernels use."""
        full: Weights = self.module.packed_weights if as_stored(self.module) else plain(self.module.weight.detach())
        return full._replace(rows=full.rows[self.first : self.first + self.count], bias=self.bias)


@dataclass(frozen=True)
class AttentionPart:
    """A layer's attention.

    ``q_norm``, ``k_norm``: per head, or of all heads together, or None. ``rotary``: the kind of layer if rotary angles
    differ by kind, else None. ``rotates``: whether queries and keys depend on position.
    """

    qkv: tuple[MatrixRows, ...]
    output: MatrixRows
    q_norm: Any
    k_norm: Any
    head_dim: int
    spec: AttentionSpec
    rotary: str | None
    rotates: bool

    @property
    def matrices(self) -> tuple[MatrixRows, ...]:
        """All of its matrices."""
        return (*self.qkv, self.output)


@dataclass(frozen=True)
class ConvolutionPart:
    """A short convolution between two gates (LFM2): ``gate_out * convolve(gate_in * x)``. ``inputs`` is the matrix of
    ``gate_in``, ``gate_out`` and x; ``taps`` is the module with weights ``[C, 1, K]``."""

    inputs: MatrixRows
    output: MatrixRows
    taps: Any

    @property
    def matrices(self) -> tuple[MatrixRows, ...]:
        return self.inputs, self.output


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer. ``before_*``, ``after_*``: norms of a part's input, and of what it adds to the residual
    stream, or None; ``residual_multiplier``: factor on what it adds."""

    mixer: AttentionPart | ConvolutionPart
    gate_up: tuple[MatrixRows, ...]
    down: MatrixRows
    before_mixer: Any
    after_mixer: Any
    before_mlp: Any
    after_mlp: Any
    residual_multiplier: float

    @property
    def matrices(self) -> tuple[MatrixRows, ...]:
        return (*self.mixer.matrices, *self.gate_up, self.down)


@dataclass(frozen=True)
class DecoderDescription:
    """All that a pass computes, for programs on a CPU and passes on a GPU."""

    layers: list[DecoderLayer]
    embedding: Any
    embedding_factor: float
    norm: Any  # after the last layer
    head: Any  # linear layer of the logits
    activation: int  # of the gates, by the kernels' number
    rotary: Any  # module of the rotary angles
    limit: int | None  # number of positions for which the angles hold; None for all
    logits_scaling: float  # divides the logits
    logits_softcap: float | None
    dtype: torch.dtype

    @property
    def attention(self) -> dict[int, AttentionPart]:
        """The layers with attention, by index."""
        return {number: each.mixer for number, each in enumerate(self.layers) if isinstance(each.mixer, AttentionPart)}

    @property
    def convolutions(self) -> dict[int, ConvolutionPart]:
        """The layers with a short convolution, by index."""
        return {n: each.mixer for n, each in enumerate(self.layers) if isinstance(each.mixer, ConvolutionPart)}


def describe(model: PreTrainedModel) -> DecoderDescription:
    """Describe a supported model."""
    decoder, config, embedding = decoder_of(model), text_config(model), model.get_input_embeddings()
    return DecoderDescription(
        layers=layers(model), embedding=embedding, embedding_factor=embedding_factor(decoder, embedding),
        norm=decoder.embedding_norm if config.model_type == "lfm2" else decoder.norm, head=model.lm_head,
        activation=ACTIVATIONS[activation(config)], rotary=decoder.rotary_emb,
        limit=position_limit(model) if "longrope" in scalings(decoder.rotary_emb) else None,
        logits_scaling=float(config.logits_scaling) if config.model_type == "granite" else 1.0,
        logits_softcap=config.final_logit_softcapping if type(model).__name__ in CAPPED_LOGITS else None,
        dtype=model.dtype,
    )  # fmt: skip


def known(model: PreTrainedModel) -> bool:
    """Return whether a program can run this model in its current state."""
    return fused() and model.dtype in PROGRAM_DTYPES and _described(model, "cpu") and _fits(model)


def known_on_gpu(model: PreTrainedModel) -> bool:
    """Return whether ``GpuForward`` can run this model in its current state, on its device."""
    if not _described(model, model.device.type):
        return False
    described = layers(model)
    matrices = [each.module for layer in described for each in layer.matrices] + [model.lm_head]
    norms = [
        isinstance(mixer, AttentionPart) and (mixer.q_norm is None) == (mixer.k_norm is None)
        for mixer in (layer.mixer for layer in described)
    ]
    return all(type(each) is nn.Linear for each in matrices) and model.lm_head.bias is None and all(norms)


def _described(model: PreTrainedModel, device: str) -> bool:
    config, decoder = text_config(model), decoder_of(model)
    if config.model_type not in FAMILIES or activation(config) not in ACTIVATIONS:
        return False
    if not hasattr(decoder, "layers") or not hasattr(model, "lm_head"):
        return False
    if config.num_hidden_layers != len(decoder.layers):  # the model then runs some of them
        return False
    return _plain(model, device) and "dynamic" not in scalings(decoder.rotary_emb)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the text decoder of a model, which is nested in models that also see images."""
    return getattr(model.model, "language_model", model.model) if hasattr(model, "model") else None


def text_config(model: PreTrainedModel) -> Any:
    """Return the text decoder's configuration."""
    return model.config.get_text_config(decoder=True)


def layers(model: PreTrainedModel) -> list[DecoderLayer]:
    """Describe each layer."""
    decoder, config = decoder_of(model), text_config(model)
    kinds = config.layer_types if isinstance(decoder.rotary_emb.rope_type, dict) else [None] * len(decoder.layers)
    return [_layer(each, config, kind) for each, kind in zip(decoder.layers, kinds, strict=True)]


def angles(rotary: Any, kind: str | None, count: int, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the first ``count`` positions, at most ``limit``; see ``angles_at``."""
    like, chunks = torch.empty(0, dtype=torch.float32), []
    for first in range(0, count, ANGLES_CHUNK):
        last = first + ANGLES_CHUNK if limit is None or count > limit else min(first + ANGLES_CHUNK, limit)
        chunks.append(angles_at(rotary, like, torch.arange(first, last), kind))
    cos, sin = (torch.cat(each)[:count] for each in zip(*chunks, strict=True))
    return cos, sin


def angles_at(
    rotary: Any, like: torch.Tensor, positions: torch.Tensor, kind: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines at int64 positions ``[n]``, float32 ``[n, half]``. ``like`` has the type and device for
    which the model's module computes; ``kind`` is as in ``AttentionPart.rotary``."""
    both = rotary(like, positions[None]) if kind is None else rotary(like, positions[None], kind)
    half = both[0].shape[-1] // 2
    cos, sin = (each[0, :, :half].float().contiguous() for each in both)
    return cos, sin


def scalings(rotary: Any) -> set[str]:
    """Return the names of the rotary scalings of all kinds of layers."""
    return set(rotary.rope_type.values()) if isinstance(rotary.rope_type, dict) else {rotary.rope_type}


def activation(config: Any) -> str:
    """Return the name of the gates' activation."""
    if config.model_type == "lfm2":  # where the activation is in the code
        return "silu"
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def weight_offset(norm: Any) -> int:
    """Return the number that a norm adds to its weight: 1 for Gemma's, else 0."""
    return int("Gemma" in type(norm).__name__)


def eps(norm: Any) -> float:
    """Return the number that a norm adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def embedding_factor(decoder: Any, embedding: nn.Module) -> float:
    """Return the factor on embeddings, rounded as in the model."""
    factor = getattr(embedding, "embed_scale", 1.0)
    weight: Any = embedding.weight
    rounded = torch.as_tensor(factor).to(weight.dtype if weight.is_floating_point() else torch.float32)
    return float(rounded) * float(getattr(decoder, "embedding_multiplier", 1.0))


def as_stored(module: nn.Module) -> bool:
    """Return whether a module's weights are quantised blocks in a file's format (``stored_weights.py``)."""
    return hasattr(type(module), "packed_weights")


def is_stored(model: nn.Module) -> bool:
    """Return whether a model has modules with quantised weights."""
    return any(as_stored(module) for module in model.modules())


def dtype_name(model: nn.Module) -> str:
    """Return the type of a model's weights: ``STORED``, ``STORED_BY_FLOATS``, or torch's name."""
    if not is_stored(model):
        return str(model.dtype).removeprefix("torch.")
    return STORED if quantises(model) else STORED_BY_FLOATS


def quantises(model: nn.Module) -> bool:
    """Return whether a model quantises inputs of some products to eight bits."""
    return any(getattr(module, "quantised", False) for module in model.modules())


def _plain(model: PreTrainedModel, device: str) -> bool:
    """Return whether all modules are of unchanged, supported classes, and all weights alike."""
    if any(added_code(module) or not type(module).__module__.startswith(SOURCES) for module in model.modules()):
        return False
    blocks = {module.weight for module in model.modules() if as_stored(module)}
    return all(
        weight.dtype == (torch.uint8 if weight in blocks else model.dtype)
        and weight.device.type == device
        and weight.is_contiguous()
        for weight in model.parameters()
    )


def _fits(model: PreTrainedModel) -> bool:
    """Return whether rows divide into vectors, and layers and matrices of a kind are alike, some with attention."""
    head: Any = model.lm_head
    described = layers(model)
    linears = [*(part.module for layer in described for part in layer.matrices), head]
    plain = type(head) is nn.Linear or (as_stored(head) and model.dtype == torch.float32)
    if not plain or head.bias is not None or any(type(module) is not type(head) for module in linears):
        return False
    kinds = {type(layer.mixer) for layer in described}
    shapes = {(type(layer.mixer), *((p.count, p.module.in_features) for p in layer.matrices)) for layer in described}
    dims = {layer.mixer.head_dim for layer in described if isinstance(layer.mixer, AttentionPart)}
    lanes = LINE // model.dtype.itemsize
    return (
        len(shapes) == len(kinds)
        and len(dims) == 1
        and not any(dim % LANES for dim in dims)
        and not any(module.in_features % lanes for module in linears)
    )


def _layer(layer: Any, config: Any, kind: str | None) -> DecoderLayer:
    if config.model_type == "lfm2":
        mlp, conv = layer.feed_forward, getattr(layer, "conv", None)
        mixer = (
            _attention(layer.self_attn, config, kind)
            if conv is None
            else ConvolutionPart(_all_rows(conv.in_proj), _all_rows(conv.out_proj), conv.conv)
        )
        pair = _all_rows(mlp.w1), _all_rows(mlp.w3)
        return DecoderLayer(mixer, pair, _all_rows(mlp.w2), layer.operator_norm, None, layer.ffn_norm, None, 1.0)
    mlp = layer.mlp
    if hasattr(mlp, "gate_up_proj"):
        gate_up = _split(mlp.gate_up_proj, *(mlp.gate_up_proj.out_features // 2,) * 2)
    else:
        gate_up = _all_rows(mlp.gate_proj), _all_rows(mlp.up_proj)
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    mixer = _attention(layer.self_attn, config, kind)
    return DecoderLayer(mixer, gate_up, _all_rows(mlp.down_proj), *_norms(layer), multiplier)


def _attention(part: Any, config: Any, kind: str | None) -> AttentionPart:
    dim, lfm2 = part.head_dim, config.model_type == "lfm2"
    if hasattr(part, "qkv_proj"):
        heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
        qkv = _split(part.qkv_proj, heads, kv_heads, kv_heads)
    else:
        qkv = tuple(_all_rows(each) for each in (part.q_proj, part.k_proj, part.v_proj))
    every = config.sliding_window if config.model_type in ("mistral", "phi3") else None  # the window of every layer
    softcap = part.attn_logit_softcapping if config.model_type == "gemma2" else None  # Gemma 3 has one and ignores it
    q_norm, k_norm = ("q_layernorm", "k_layernorm") if lfm2 else ("q_norm", "k_norm")
    return AttentionPart(
        qkv, _all_rows(part.out_proj if lfm2 else part.o_proj),
        q_norm=getattr(part, q_norm, None), k_norm=getattr(part, k_norm, None), head_dim=dim,
        spec=AttentionSpec(part.scaling, getattr(part, "sliding_window", every), softcap), rotary=kind,
        rotates=bool(getattr(part, "use_rope", True)),
    )  # fmt: skip


def _norms(layer: Any) -> tuple[Any, Any, Any, Any]:
    first, second = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
    if hasattr(layer, "pre_feedforward_layernorm"):
        return first, second, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return (first, None, second, None) if first is not None else (None, second, None, layer.post_feedforward_layernorm)


def _all_rows(module: Any) -> MatrixRows:
    return MatrixRows(module, 0, module.out_features)


def _split(module: Any, *counts: int) -> tuple[MatrixRows, ...]:
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(MatrixRows(module, first, count) for first, count in zip(firsts, counts, strict=True))
