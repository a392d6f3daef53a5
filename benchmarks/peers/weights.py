"""Write a transformers model's exact weights to a GGUF file, for engines that read no other format.

The metadata comes from the GGUF file that the model was made from, or from its configuration and tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "mistral")  # model types that are llama for llama.cpp
PRECISIONS = {torch.float32: ("F32", 0), torch.bfloat16: ("BF16", 32), torch.float16: ("F16", 1)}
"""GGUF's name of each torch type, and the file type number for files that mostly hold it."""
RANDOM_SIZE = 0.02  # standard deviation of random weights: that of transformers' models
_COMPUTED = ("tokenizer.", "llama.", "general.name")  # prefixes of the keys that are taken from a source file
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | None) -> None:
    """Raise ValueError for a model that cannot be written."""
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"a GGUF file can be written of {' and '.join(ARCHITECTURES)} models, and this is {kind}")
    rope = model.config.rope_parameters.get("rope_type", "default")
    if rope != "default":
        raise ValueError(f"a GGUF file can be written of models with plain rotary positions, and this has {rope!r}")
    if source is None and _vocabulary(tokenizer)["model"].get("type") != "BPE":
        raise ValueError("this tokenizer's GGUF form is not known; give the file that the model came from with --gguf")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, source: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write the model with its exact weights, or rounded to ``dtype``; raise ValueError if ``source`` is of another
    model.

    Args:
        model: one that ``check`` accepts. Weights on the device ``meta`` are written as seeded random numbers.
        source: the GGUF file that the model came from, if there is one.
    """
    import gguf

    said = _from_source(source) if source is not None else _from_model(model, tokenizer)
    for key, ours in (("block_count", model.config.num_hidden_layers), ("embedding_length", model.config.hidden_size)):
        theirs = said.get(f"llama.{key}", (None,))[0]
        if theirs != ours:
            raise ValueError(f"--gguf is of another model: its llama.{key} is {theirs}, the model's is {ours}")
    writer = gguf.GGUFWriter(file, "llama")
    for key, (value, kind, part) in said.items():
        writer.add_key_value(key, value, kind, part)
    precision, number = PRECISIONS[dtype or model.dtype]
    writer.add_file_type(number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = gguf.GGMLQuantizationType
    tensors = {name: (tensor, kinds.F32 if tensor.dim() == 1 else kinds[precision]) for name, tensor in _tensors(model)}
    for name, (tensor, kind) in tensors.items():  # llama.cpp needs norms in float32
        nbytes = tensor.numel() * gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), nbytes, kind)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        finish()
    torch.manual_seed(0)
    for tensor, kind in tensors.values():
        if tensor.is_meta:
            tensor = torch.ones(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape) * RANDOM_SIZE
        writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().float().numpy(), kind))
    writer.close()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their GGUF names; queries and keys in llama.cpp's order of rotary pairs."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"{name} has no name in a GGUF file of llama")
        count = next((count for end, count in heads.items() if name.endswith(end)), None)
        here = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
        yield stored, here if count is None else interleaved(here, count)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from transformers' two halves to llama.cpp's rotary pairs."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _from_source(source: Path) -> dict[str, tuple[Any, Any, Any]]:
    import gguf

    fields = gguf.GGUFReader(source).fields
    found: dict[str, tuple[Any, Any, Any]] = {}
    for key, field in fields.items():
        if key.startswith(_COMPUTED):
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            found[key] = (field.contents(), field.types[0], part)
    return found


def _from_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, tuple[Any, Any, Any]]:
    """Make metadata of the configuration and tokenizer, without the splitting of words: peers get ids."""
    from gguf import GGUFValueType as Kind

    config, vocabulary = model.config, _vocabulary(tokenizer)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    found: dict[str, tuple[Any, Any, Any]] = {f"llama.{key}": (n, Kind.UINT32, None) for key, n in numbers.items()}
    found["llama.rope.freq_base"] = (float(config.rope_parameters["rope_theta"]), Kind.FLOAT32, None)
    found["llama.attention.layer_norm_rms_epsilon"] = (float(config.rms_norm_eps), Kind.FLOAT32, None)
    words, kinds = _words(vocabulary, config.vocab_size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in vocabulary["model"]["merges"]]
    found["tokenizer.ggml.model"] = ("gpt2", Kind.STRING, None)
    found["tokenizer.ggml.pre"] = ("default", Kind.STRING, None)
    found["tokenizer.ggml.tokens"] = (words, Kind.ARRAY, Kind.STRING)
    found["tokenizer.ggml.token_type"] = (kinds, Kind.ARRAY, Kind.INT32)
    found["tokenizer.ggml.merges"] = (merges, Kind.ARRAY, Kind.STRING)
    found["tokenizer.ggml.add_bos_token"] = (False, Kind.BOOL, None)
    for name, token in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if token is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = (int(token), Kind.UINT32, None)
    return found


def _words(vocabulary: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the tokens by id, and each one's kind; unused ids get a placeholder."""
    by_id = {i: (word, _NORMAL) for word, i in vocabulary["model"]["vocab"].items()}
    for token in vocabulary.get("added_tokens", []):
        by_id[token["id"]] = (token["content"], _CONTROL if token["special"] else _USER_DEFINED)
    pairs = [by_id.get(i, (f"<unused{i}>", _CONTROL)) for i in range(size)]
    return [word for word, _ in pairs], [kind for _, kind in pairs]


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {"model": {}} if backend is None else json.loads(backend.to_str())
