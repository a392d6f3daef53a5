"""Quantise a Hugging Face model's matrices once, and keep them as a GGUF file in the user's cache.

The file has only weights, with transformers' names and row order, so other programs cannot read it; configuration and
tokenizer come from the model's folder. gguf's quantiser makes the blocks, with llama.cpp's bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.models.forward.runtime import user_folder
from forerun.models.loading.as_stored import load_as_stored
from forerun.models.loading.gguf import GGUF_SUFFIX, Progress, counted, read_header
from forerun.models.loading.gguf_layout import EXPERTS, TransformersLayout
from forerun.models.loading.quantised_checkpoints import name_after

log = logging.getLogger(__name__)

QUANTISED_VERSION = 1
"""Version of the files; others are ignored."""

ROWS_AT_ONCE = 1 << 22
"""Numbers quantised at once: some 100 MB of temporary arrays."""

SAMPLE = 1 << 20
"""Numbers quantised to estimate the total time."""

SPARE_BYTES = 1 << 28
"""Bytes left free on the disk."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class _StoredPart:
    """A tensor of the file, by transformers' name, with gates and ups of experts separate; ``kind`` is its format."""

    name: str
    weight: torch.Tensor
    kind: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return int(self.weight.numel() // block * size)

    def pieces(self) -> Iterator[np.ndarray[Any, Any]]:
        rows = self.weight.detach().reshape(-1, self.weight.shape[-1])
        for piece in torch.split(rows, max(1, ROWS_AT_ONCE // rows.shape[1])):
            yield quantize(np.ascontiguousarray(piece.float().numpy()), self.kind)


def load_quantised(
    folder: Path, kind: str, config: PreTrainedConfig, load: Callable[[], PreTrainedModel], progress: Progress
) -> PreTrainedModel:
    """Load a model with matrices quantised to ``kind``; raise ValueError for a full disk or an unsuitable matrix."""
    file = file_of(folder, kind)
    if not file.exists():
        _write(folder, file, _parts(folder, load(), GGMLQuantizationType[kind.upper()]), progress)
    model = load_as_stored(file, read_header(file), config, progress, TransformersLayout())
    name_after(model, folder)
    return model


def file_of(folder: Path, kind: str) -> Path:
    """Return a folder's file for a quantisation; its name depends on the folder's weights and configuration."""
    base = user_folder()
    if base is None:
        raise ValueError("there is no folder for quantised weights: set XDG_CACHE_HOME")
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    stated = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    key = json.dumps([QUANTISED_VERSION, version("gguf"), version("transformers"), str(folder.resolve()), stated])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return base.parent / "quantised" / f"{folder.resolve().name}-{kind}-{digest}{GGUF_SUFFIX}"


def _parts(folder: Path, model: PreTrainedModel, kind: GGMLQuantizationType) -> list[_StoredPart]:
    """Return all parameters: matrices of linear layers, embeddings and experts in blocks, others as float32."""
    parts = []
    for name, weight in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, nn.Linear | nn.Embedding) and leaf == "weight":
            parts.append(_StoredPart(name, weight, kind))
        elif leaf == "gate_up_proj" and weight.dim() == 3:
            for each, rows in zip(EXPERTS[:2], weight.chunk(2, 1), strict=True):
                parts.append(_StoredPart(f"{owner}.{each}", rows, kind))
        elif leaf == EXPERTS[2] and weight.dim() == 3:
            parts.append(_StoredPart(name, weight, kind))
        else:
            parts.append(_StoredPart(name, weight, GGMLQuantizationType.F32))
    block, _ = GGML_QUANT_SIZES[kind]
    for part in parts:
        if part.kind == kind and part.weight.shape[-1] % block:
            raise ValueError(
                f"rows of {part.name} in {folder} have {part.weight.shape[-1]} numbers, and {kind.name} needs a "
                f"multiple of {block}; do without --quantize"
            )
    return parts


def _write(folder: Path, file: Path, parts: list[_StoredPart], progress: Progress) -> None:
    nbytes = sum(part.nbytes for part in parts)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(file.parent).free
    if free < nbytes + SPARE_BYTES:
        raise ValueError(f"{file} needs {nbytes:,} bytes, and {free:,} are free; set XDG_CACHE_HOME to another disk")
    log.info("quantising %s, once: %.2f GB in %s, about %.0f s", folder, nbytes / 1e9, file, _expected_seconds(parts))
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        _write_tensors(unfinished, parts, progress)
        unfinished.replace(file)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _write_tensors(file: Path, parts: list[_StoredPart], progress: Progress) -> None:
    writer = GGUFWriter(file, "transformers")
    for part in parts:
        block, size = GGML_QUANT_SIZES[part.kind]
        *rows, columns = part.weight.shape
        shape = (*rows, columns) if part.kind == GGMLQuantizationType.F32 else (*rows, columns // block * size)
        dtype = np.dtype(np.float32 if part.kind == GGMLQuantizationType.F32 else np.uint8)
        writer.add_tensor_info(part.name, shape, dtype, part.nbytes, part.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for part in counted(parts, progress):
            writer.write_tensor_data(np.concatenate([*part.pieces()]))
    finally:
        writer.close()


def _expected_seconds(parts: list[_StoredPart]) -> float:
    largest = max(parts, key=lambda part: part.weight.numel())
    rows = largest.weight.detach().reshape(-1, largest.weight.shape[-1])
    sample = _StoredPart(largest.name, rows[: max(1, SAMPLE // rows.shape[1])], largest.kind)
    began = time.perf_counter()
    for _ in sample.pieces():
        pass
    return (time.perf_counter() - began) * sum(prod(part.weight.shape) for part in parts) / sample.weight.numel()
