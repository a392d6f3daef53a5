"""From a GGUF file to a model whose weights stay as stored: mapped from the file, never dequantised.

The model is built without weights. Linear layers and embeddings become ``stored.StoredLinear`` and
``stored.StoredEmbedding`` over the file's own bytes. Rows that GGUF keeps in another order than transformers (queries
and keys of Llama) are copied into transformers' order. Norms and biases become float32. Tensor names come from gguf's
own table, row orders from transformers' code for each architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from forerun.kernels.linear.gguf_formats import GGUF_FORMATS
from forerun.kernels.runtime.vector_ir import unusable
from forerun.models.loading.gguf import Header, Progress, Tensor, counted
from forerun.models.loading.stored_weights import StoredEmbedding, StoredLinear

BLOCK_COLUMNS = {each.name: each.words for each in GGUF_FORMATS}
"""Columns per block, by the name of a format that there is a kernel for."""
INSTEAD = "--dtype bfloat16 dequantises it"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def load_as_stored(
    file: Path, header: Header, config: PreTrainedConfig, progress: Progress = lambda done, total: None
) -> PreTrainedModel:
    """A decoder over the weights in a file.

    Args:
        file: a GGUF file that ``gguf.check`` accepted.
        header: the file's header.
        config: the model's configuration.
        progress: called with tensors done and to do.

    Raises:
        ValueError: if a tensor's quantisation has no kernel, or the file cannot be used for another reason; it says
            which.
    """
    if (reason := unusable()) is not None:
        raise ValueError(f"there is no kernel for stored weights here: {reason}; {INSTEAD}")
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_buffers(file, model)
    _Filler(file, header, model).fill(progress)
    model.name_or_path = str(file)
    return model.requires_grad_(False)


def _fill_buffers(file: Path, model: PreTrainedModel) -> None:
    """Fill the buffers that a model computes from its configuration: rotary angles and factors."""
    for module in model.modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        for name, buffer in own.items():
            module._buffers[name] = (
                torch.full_like(buffer, torch.nan, device="cpu") if buffer.is_floating_point() else None
            )
        if own:
            model._init_weights(module)
        for name in own:
            value = module._buffers[name]
            if value is None or value.isnan().any():
                raise ValueError(f"{file}: {type(module).__name__}.{name} cannot be had without its weights; {INSTEAD}")


@dataclass
class _Filler:
    """Puts a file's tensors into a model that was built without weights."""

    file: Path
    header: Header
    model: PreTrainedModel

    def __post_init__(self) -> None:
        kind = TENSOR_PROCESSORS.get(self.header.architecture, TensorProcessor)
        self._processor = kind(config=self.model.config.to_dict())
        self._names = self._names_of_tensors()
        self._data = np.memmap(self.file, np.uint8, "c")
        self._matrices: dict[str, tuple[nn.Parameter, str, int]] = {}

    def fill(self, progress: Progress) -> None:
        """Place all tensors, then exchange the modules that hold stored weights."""
        for name, tensor in counted([*self.header.tensors.items()], progress):
            if name in self._names:
                self._take(name, self._names[name], tensor)
        for name, module in [*self.model.named_modules()]:
            if isinstance(module, nn.Linear | nn.Embedding):
                self._exchange(name, module)
        missing = sorted(name for name, weight in self.model.named_parameters() if weight.is_meta)
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(f"the weights in {self.file} are incomplete and would be random: {listed}")

    def _names_of_tensors(self) -> dict[str, str]:
        """The model's name for each of the file's tensors."""
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.header.architecture)
        table = get_tensor_name_map(arch, self.model.config.num_hidden_layers)
        ours = [name for name, _ in self.model.named_parameters()]
        theirs = [table.get_name(name, (".weight", ".bias")) for name in ours]
        return {there: here for there, here in zip(theirs, ours, strict=True) if there is not None}

    def _take(self, name: str, ours: str, tensor: Tensor) -> None:
        owner, _, leaf = ours.rpartition(".")
        module: Any = self.model.get_submodule(owner)
        kind = GGMLQuantizationType(tensor.kind)
        if len(tensor.shape) == 1:
            floats = dequantize(self._rows(tensor)[0], kind).astype(np.float32)
            weights = np.ascontiguousarray(self._processor.process(floats, name).weights, np.float32)
            self._check_shape(name, weights.shape, getattr(module, leaf).shape)
            setattr(module, leaf, nn.Parameter(torch.from_numpy(weights.copy()), requires_grad=False))
            return
        if kind.name not in BLOCK_COLUMNS:
            raise ValueError(f"{self.file}: there is no kernel for {kind.name}, as tensor {name} is stored; {INSTEAD}")
        if not isinstance(module, nn.Linear | nn.Embedding) or leaf != "weight":
            raise ValueError(f"{self.file}: tensor {name} is not of a plain linear layer; {INSTEAD}")
        self._check_shape(name, tensor.shape[::-1], module.weight.shape)
        block = BLOCK_COLUMNS[kind.name]
        if tensor.shape[0] % block:
            raise ValueError(
                f"{self.file}: rows of tensor {name} have {tensor.shape[0]} numbers, and the kernel for {kind.name} "
                f"takes them {block} at a time; {INSTEAD}"
            )
        rows = torch.from_numpy(self._in_order(name, self._rows(tensor)))
        self._matrices[ours] = nn.Parameter(rows, requires_grad=False), kind.name, tensor.shape[0]

    def _check_shape(self, name: str, there: tuple[int, ...], expected: torch.Size) -> None:
        if tuple(there) != tuple(expected):
            raise ValueError(f"{self.file}: tensor {name} has the shape {[*there]}, and the model's is {[*expected]}")

    def _rows(self, tensor: Tensor) -> Bytes:
        """A tensor's bytes ``[O, row]``, mapped from the file."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        begin, count = self.header.data + tensor.offset, prod(tensor.shape[1:])
        row = tensor.shape[0] // block * size
        return self._data[begin : begin + count * row].reshape(count, row)

    def _in_order(self, name: str, rows: Bytes) -> Bytes:
        """The rows in transformers' order; the order is found by running transformers' code on row numbers."""
        numbers = np.arange(len(rows))
        order = self._processor.process(numbers[:, None], name).weights
        if order.shape != (len(rows), 1) or not np.array_equal(np.sort(order[:, 0]), numbers):
            raise ValueError(f"{self.file}: tensor {name} is more than rows in another order; {INSTEAD}")
        return rows if np.array_equal(order[:, 0], numbers) else np.ascontiguousarray(rows[order[:, 0]])

    def _exchange(self, name: str, module: nn.Linear | nn.Embedding) -> None:
        """Replace a module by one over stored weights; a head without weights shares the embedding's."""
        matrix = self._matrices.get(f"{name}.weight")
        if matrix is None and module is self.model.get_output_embeddings() and self.model.config.tie_word_embeddings:
            matrix = next((self._matrices[key] for key in self._embeddings()), None)
        if matrix is None:
            return
        rows, kind, columns = matrix
        if isinstance(module, nn.Linear):
            made: nn.Module = StoredLinear(rows, kind, columns, module.bias)
        else:
            made = StoredEmbedding(rows, kind, columns, getattr(module, "embed_scale", None))
        self.model.set_submodule(name, made)

    def _embeddings(self) -> Iterator[str]:
        """The name of the input embedding's weights."""
        inputs = self.model.get_input_embeddings()
        yield from (f"{name}.weight" for name, module in self.model.named_modules() if module is inputs)
