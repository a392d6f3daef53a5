"""A tiny Llama and the GGUF files that hold it."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.saved_models import small_llama, small_tokenizer

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[real]'")

HEADS = 4
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<end>' }}{% endfor %}"


def model() -> PreTrainedModel:
    return small_llama(intermediate_size=64, num_attention_heads=HEADS, tie_word_embeddings=True)


def separated(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters as GGUF has them: gates and ups of experts are apart."""
    for name, weight in weights:
        if name.endswith("gate_up_proj"):
            for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", part), rows
        else:
            yield name, weight


def names_of(architecture: str, layers: int) -> Callable[[str], str | None]:
    """llama.cpp's name of a parameter, if it has one."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)

    def name_of(ours: str) -> str | None:
        theirs: str | None = names.get_name(ours, (".weight", ".bias"))
        return theirs and theirs + ".weight" * theirs.endswith("_exps")

    return name_of


def in_pairs(ours: str, rows: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Rows of a Llama's parameter as GGUF has them: of queries and keys, the two halves of a head's dimensions
    alternate."""
    if "q_proj" not in ours and "k_proj" not in ours:
        return rows
    rest = rows.shape[1:]
    halves = rows.reshape(heads if "q_proj" in ours else kv_heads, 2, -1, *rest)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def finish(writer: Any) -> None:
    for each in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        each()


def write(file: Path, kind: str = "F32", change: Callable[[Any], None] | None = None, **more: Any) -> Path:
    """A GGUF file of the tiny model; ``change`` may add to the writer."""
    writer = gguf.GGUFWriter(file, more.get("architecture", "llama"))
    for key, value in (("context_length", 128), ("embedding_length", 32), ("block_count", 2)):
        getattr(writer, f"add_{key}")(value)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(32 // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    if more.get("tokenizer", True):
        add_tokenizer(writer, more.get("pre", "gpt-2"))
    if change is not None:
        change(writer)
    quantisation, name_of = gguf.GGMLQuantizationType[kind], names_of("llama", 2)
    for ours, weight in model().named_parameters():
        name, array = name_of(ours), in_pairs(ours, weight.detach().numpy(), HEADS, HEADS)
        if name in more.get("without", ()):
            continue
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
    finish(writer)
    return file


def add_tokenizer(writer: Any, pre: str) -> None:
    tokenizer = small_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<end>" else 1 for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(vocabulary["<end>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def logits(of: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return of(torch.tensor([[3, 20, 30, 41, 7, 12, 20, 30, 41, 8, 9]])).logits
