"""From a GGUF file to a model whose weights stay as stored: mapped from the file, never dequantised.

The model is built without weights. Linear layers, embeddings and experts become the modules of ``stored_weights.py``
over the file's own bytes. Rows that GGUF keeps in another order than transformers (queries and keys of Llama) are
copied into transformers' order. Norms, biases and routers become float32. Tensor names come from gguf's own table, row
orders from transformers' code for each architecture.
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
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from forerun.kernels.linear.gguf_formats import GGUF_FORMATS
from forerun.kernels.runtime.vector_ir import unusable
from forerun.models.loading.gguf import Header, Progress, Tensor, counted, is_mixtral
from forerun.models.loading.stored_weights import StoredEmbedding, StoredExperts, StoredLinear

BLOCK_COLUMNS = {each.name: each.words for each in GGUF_FORMATS}
"""Columns per block, by the name of a format that there is a kernel for."""
INSTEAD = "--dtype bfloat16 dequantises it"
EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Matrices of experts, each stacked in one tensor."""
ROUTER = ".ffn_gate_inp"
"""Part of the names of routers, small matrices of modules that compute with floats."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def check_formats(file: Path, header: Header) -> None:
    """Refuse a file whose matrices cannot be used as they are stored. It reads nothing but the header.

    Raises:
        ValueError: if there are no kernels here, or none for a tensor; it names the tensor, its format and those that
            there are kernels for.
    """
    if (reason := unusable()) is not None:
        raise ValueError(f"there is no kernel for stored weights here: {reason}; {INSTEAD}")
    for name, tensor in header.tensors.items():
        kind, columns = GGMLQuantizationType(tensor.kind).name, tensor.shape[0]
        if len(tensor.shape) == 1 or ROUTER in name:
            continue
        if kind not in BLOCK_COLUMNS:
            raise ValueError(
                f"{file}: there is no kernel for {kind}, as tensor {name} is stored; there are kernels for "
                f"{', '.join(BLOCK_COLUMNS)}; {INSTEAD}"
            )
        if columns % BLOCK_COLUMNS[kind]:
            raise ValueError(
                f"{file}: rows of tensor {name} have {columns} numbers, and the kernel for {kind} takes them "
                f"{BLOCK_COLUMNS[kind]} at a time; {INSTEAD}"
            )


def load_as_stored(
    file: Path, header: Header, config: PreTrainedConfig, progress: Progress = lambda done, total: None
) -> PreTrainedModel:
    """A decoder over the weights in a file.

    Args:
        file: a GGUF file that ``gguf.check`` and ``check_formats`` accepted.
        header: the file's header.
        config: the model's configuration.
        progress: called with tensors done and to do.

    Raises:
        ValueError: if the file cannot be used; it says why.
    """
    config = _mixtral(config, header) if is_mixtral(header) else config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_buffers(file, model)
    _Filler(file, header, model).fill(progress)
    model.name_or_path = str(file)
    return model.requires_grad_(False)


def _mixtral(config: PreTrainedConfig, header: Header) -> PreTrainedConfig:
    """Mixtral's configuration, from Llama's, which transformers reads from its files."""
    common = MixtralConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    shared = {key: value for key, value in config.to_dict().items() if key in common}
    count, used = (header.metadata[f"llama.expert_{key}"] for key in ("count", "used_count"))
    return MixtralConfig(**{**shared, "num_local_experts": count, "num_experts_per_tok": used})


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
            elif f"{name}.{EXPERTS[0]}" in self._matrices:
                self._exchange_experts(name, module)
        missing = sorted(name for name, weight in self.model.named_parameters() if weight.is_meta)
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(f"the weights in {self.file} are incomplete and would be random: {listed}")

    def _names_of_tensors(self) -> dict[str, str]:
        """The model's name for each of the file's tensors."""
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.header.architecture)
        table = get_tensor_name_map(arch, self.model.config.num_hidden_layers)
        ours = [each for name, _ in self.model.named_parameters() for each in _separate(name)]
        theirs = [table.get_name(name, (".weight", ".bias")) for name in ours]
        theirs = [f"{name}.weight" if name is not None and name.endswith("_exps") else name for name in theirs]
        return {there: here for there, here in zip(theirs, ours, strict=True) if there is not None}

    def _take(self, name: str, ours: str, tensor: Tensor) -> None:
        owner, _, leaf = ours.rpartition(".")
        module: Any = self.model.get_submodule(owner)
        if len(tensor.shape) == 1 or ROUTER in name:
            weights = self._floats(name, tensor)
            self._check_shape(name, weights.shape, getattr(module, leaf).shape)
            setattr(module, leaf, nn.Parameter(torch.from_numpy(weights), requires_grad=False))
            return
        if leaf in EXPERTS:
            expected = self._shape_of_experts(name, module, leaf)
        elif isinstance(module, nn.Linear | nn.Embedding) and leaf == "weight":
            expected = module.weight.shape
        else:
            raise ValueError(f"{self.file}: tensor {name} is not of a plain linear layer; {INSTEAD}")
        self._check_shape(name, tensor.shape[::-1], expected)
        rows = torch.from_numpy(self._in_order(name, self._rows(tensor))).view(*expected[:-1], -1)
        kind = GGMLQuantizationType(tensor.kind).name
        self._matrices[ours] = nn.Parameter(rows, requires_grad=False), kind, tensor.shape[0]

    def _floats(self, name: str, tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor dequantised, with the shape that transformers gives it."""
        floats = dequantize(self._rows(tensor), GGMLQuantizationType(tensor.kind)).astype(np.float32)
        weights = self._processor.process(floats.reshape(tensor.shape[::-1]), name).weights
        return np.array(weights, np.float32, order="C")

    def _shape_of_experts(self, name: str, module: Any, leaf: str) -> torch.Size:
        """The shape ``[E, O, K]`` of one matrix of experts; refuses those that are more than three matrices each."""
        parts: dict[str, torch.Size] = {part: parameter.shape for part, parameter in module.named_parameters()}
        usual = getattr(module, "is_concatenated", False) and not getattr(module, "is_transposed", True)
        gated = getattr(type(module), "_apply_gate", None) is _default_apply_gate
        if not (usual and gated) or parts.keys() != {"gate_up_proj", "down_proj"} or module.has_post_expert_norm:
            raise ValueError(f"{self.file}: tensor {name} is of experts that are not gated linear units; {INSTEAD}")
        if leaf == "down_proj":
            return parts[leaf]
        count, both, columns = parts["gate_up_proj"]
        return torch.Size((count, both // 2, columns))

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

    def _exchange_experts(self, name: str, module: Any) -> None:
        matrices = [self._matrices.get(f"{name}.{part}") for part in EXPERTS]
        if None not in matrices:
            gate, up, down = ((rows, kind) for rows, kind, _ in filter(None, matrices))
            self.model.set_submodule(name, StoredExperts(gate, up, down, module.act_fn))

    def _embeddings(self) -> Iterator[str]:
        """The name of the input embedding's weights."""
        inputs = self.model.get_input_embeddings()
        yield from (f"{name}.weight" for name, module in self.model.named_modules() if module is inputs)


def _separate(name: str) -> tuple[str, ...]:
    """The names of the matrices that a parameter of transformers stacks: gates and ups of experts are one."""
    owner, _, leaf = name.rpartition(".")
    return tuple(f"{owner}.{part}" for part in EXPERTS[:2]) if leaf == "gate_up_proj" else (name,)
