"""Hybrids in GGUF files, written as llama.cpp's converter writes them, with an MTP layer or without."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from support.gguf_files import add_tokenizer, finish, gguf, names_of, separated
from support.saved_models import small_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": len(small_tokenizer()), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": small_tokenizer().eos_token_id,
}  # fmt: skip
KEY_HEADS, VALUE_HEADS, VALUE_DIM, KEY_DIM = 2, 6, 16, 8
LINEAR: dict[str, Any] = {
    "head_dim": 16, "full_attention_interval": 4, "linear_num_key_heads": KEY_HEADS, "linear_conv_kernel_dim": 4,
    "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"full_attn_idxs": [2], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}),
    "qwen35": ("Qwen3_5", LINEAR),
    "qwen35moe": ("Qwen3_5Moe", {**LINEAR, **EXPERTS}),
}
"""llama.cpp's names of architectures, and transformers' classes."""
FAMILIES = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text")
"""Their model types."""


def built(architecture: str) -> PreTrainedModel:
    name, more = MODELS[architecture]
    config = getattr(transformers, {"Lfm2": "Lfm2Config"}.get(name, f"{name}TextConfig"))(**SHAPE, **more)
    torch.manual_seed(5)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 1 and "A_log" not in key:
                weight += 0.2 * torch.randn_like(weight)
    return model


def tiled(rows: np.ndarray, first: int, dim: int) -> np.ndarray:
    """Rows of value heads as llama.cpp has them from row ``first`` on: the first of each key head, then the second."""
    heads = rows[first:].reshape(KEY_HEADS, VALUE_HEADS // KEY_HEADS, dim, *rows.shape[1:])
    return np.concatenate([rows[:first], heads.swapaxes(0, 1).reshape(rows[first:].shape)])


def as_llama_cpp(ours: str, array: np.ndarray) -> np.ndarray:
    """A parameter as llama.cpp's converter writes it, but for norms; of LFM2 only convolutions change."""
    leaf = ours.removesuffix(".weight").rpartition(".")[2]
    if leaf in ("conv", "conv1d"):
        array = array.squeeze(1)
    if "linear_attn" in ours:
        if leaf == "A_log":
            array = -np.exp(array)
        if leaf in ("in_proj_qkv", "conv1d"):
            return tiled(array, 2 * KEY_HEADS * KEY_DIM, VALUE_DIM)
        if leaf == "in_proj_z":
            return tiled(array, 0, VALUE_DIM)
        if leaf in ("A_log", "dt_bias", "in_proj_a", "in_proj_b"):
            return tiled(array, 0, 1)
        return tiled(array.T, 0, VALUE_DIM).T if leaf == "out_proj" else array
    return array


def write(
    file: Path, architecture: str, kind: str, mtp: Mapping[str, torch.Tensor] | None = None, *, decoder: bool = True,
    **more: Any,
) -> Path:  # fmt: skip
    """A file of the model of that architecture, with matrices of that kind.

    Args:
        file: to write.
        architecture: llama.cpp's name.
        kind: of quantisation.
        mtp: tensors of an MTP layer, as safetensors files name them.
        decoder: false for a file with the MTP layer alone, beside what llama.cpp needs to load it.
        more: entries of the metadata.
    """
    model, number = built(architecture), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, architecture)
    add_tokenizer(writer, "gpt-2")
    _add_metadata(writer, architecture, 0 if mtp is None else 1)
    for key, value in more.items():
        writer.add_bool(f"{architecture}.{key}", value)
    name_of = names_of(architecture, SHAPE["num_hidden_layers"] + 1)
    weights = [(ours, weight) for ours, weight in model.named_parameters() if decoder or ".layers." not in ours]
    for ours, weight in separated([*weights, *_block(mtp or {})]):
        theirs = name_of(ours) or ours.replace("model.layers", "blk").replace("linear_attn.dt_bias", "ssm_dt.bias")
        theirs += ".weight" * theirs.endswith("_exps")
        array = weight.detach().float().numpy()
        zero_centred = architecture != "lfm2" and "norm" in ours and "linear_attn" not in ours
        array = array + 1 if zero_centred else as_llama_cpp(ours, array)
        array = np.ascontiguousarray(array[0] if "shared_expert_gate" in ours else array, np.float32)
        if array.ndim == 1 or "conv" in theirs or ".ffn_gate_inp" in theirs:
            writer.add_tensor(theirs, array)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, number), raw_dtype=number)
    finish(writer)
    return file


NEXTN = {
    "fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}  # fmt: skip
"""llama.cpp's names of what surrounds an MTP layer."""


def _block(mtp: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an MTP layer under the names of a further layer of the decoder."""
    for name, weight in mtp.items():
        part, _, leaf = name.removeprefix("mtp.").removeprefix("layers.0.").partition(".")
        yield f"model.layers.{SHAPE['num_hidden_layers']}.{NEXTN.get(part, part)}.{leaf}".rstrip("."), weight


def _add_metadata(writer: Any, architecture: str, mtp_layers: int) -> None:
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"] + mtp_layers)
    if mtp_layers:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", mtp_layers)
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_rope_freq_base(1e4 if architecture != "lfm2" else 1e6)
    if architecture == "lfm2":
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_head_count_kv([0, 0, SHAPE["num_key_value_heads"], 0])
        writer.add_uint32("lfm2.shortconv.l_cache", 3)
        return
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    numbers = {
        "attention.key_length": LINEAR["head_dim"], "attention.value_length": LINEAR["head_dim"],
        "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": KEY_DIM, "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS, "ssm.inner_size": VALUE_HEADS * VALUE_DIM, "rope.dimension_count": 8,
    }  # fmt: skip
    if architecture == "qwen35moe":
        numbers |= {
            "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32, "expert_count": 4,
            "expert_used_count": 2,
        }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array(f"{architecture}.rope.dimension_sections", [2, 1, 1, 0])
