"""Hybrids in GGUF files: read as they are stored they are the model that transformers dequantises, and drafts change
nothing. The files are written here as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.gguf_files import add_tokenizer, gguf, separated
from support.saved_models import small_tokenizer
from transformers import PreTrainedModel

import forerun
from forerun.kernels.runtime import vector_ir
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import InputOrder, StoredLinear

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

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
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
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


def write(file: Path, architecture: str, kind: str, **more: Any) -> Path:
    """A file of the model of that architecture, with matrices of that kind."""
    model, number = built(architecture), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, architecture)
    add_tokenizer(writer, "gpt-2")
    _add_metadata(writer, architecture)
    for key, value in more.items():
        writer.add_bool(f"{architecture}.{key}", value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, SHAPE["num_hidden_layers"])
    for ours, weight in separated(model):
        theirs = names.get_name(ours, (".weight", ".bias"))
        theirs = theirs or ours.replace("model.layers", "blk").replace("linear_attn.dt_bias", "ssm_dt.bias")
        theirs += ".weight" * theirs.endswith("_exps")
        array = weight.detach().numpy()
        zero_centred = architecture != "lfm2" and "norm" in ours and "linear_attn" not in ours
        array = array + 1 if zero_centred else as_llama_cpp(ours, array)
        array = np.ascontiguousarray(array[0] if "shared_expert_gate" in ours else array, np.float32)
        if array.ndim == 1 or "conv" in theirs or ".ffn_gate_inp" in theirs:
            writer.add_tensor(theirs, array)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, number), raw_dtype=number)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        finish()
    writer.close()
    return file


def _add_metadata(writer: Any, architecture: str) -> None:
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
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


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[3, 20, 30, 41, 7, 12, 20, 30, 41, 8, 9]])).logits


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_read_as_it_is_stored_is_what_transformers_dequantises(tmp_path: Path, architecture: str) -> None:
    exact = built(architecture)
    file = write(tmp_path / "exact.gguf", architecture, "F32")
    found, _ = load(str(file), "stored")
    torch.testing.assert_close(logits(found), logits(exact), atol=1e-4, rtol=1e-4)
    file = write(tmp_path / "m.gguf", architecture, "Q8_0")
    stored, _ = load(str(file), "stored", activations="float32")
    dequantised, _ = load(str(file), "float32")
    assert not torch.allclose(logits(dequantised), logits(exact), atol=1e-3)
    torch.testing.assert_close(logits(stored), logits(dequantised), atol=5e-4, rtol=1e-4)  # 1.2e-4 on some processors
    assert any(isinstance(module, StoredLinear) for module in stored.modules())
    orders = [module for module in stored.modules() if isinstance(module, InputOrder)]
    assert len(orders) == (0 if architecture == "lfm2" else 3)  # columns of the outputs of each recurrent layer


@pytest.mark.parametrize("architecture", ["lfm2", "qwen35"])
def test_drafts_change_nothing(tmp_path: Path, architecture: str) -> None:
    file = write(tmp_path / "m.gguf", architecture, "Q4_1")
    texts, (model, _) = [], load(str(file), "stored")
    for drafter in ("none", "auto", "trie"):
        engine = forerun.Engine(model, drafter)
        assert engine.exactness.level == "bitwise", engine.exactness.reason
        assert isinstance(engine.target, CompiledScorer) == (architecture == "lfm2")
        prompts = [[3, 20, 30, 41, 7, 3, 20, 30], [9, 9, 9]]
        texts.append(engine.generate(prompts, max_new_tokens=60, eos_token_id=None).sequences.tolist())
    assert texts[0] == texts[1] == texts[2]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "lfm2", "F32", **{"attention.causal": False})
    for dtype in ("stored", "float32"):
        with pytest.raises(ValueError, match="holds no decoder: its attention sees the tokens after each one"):
            load(str(file), dtype)
