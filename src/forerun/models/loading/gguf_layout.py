"""How GGUF files differ from transformers: names of tensors, orders of rows and columns, and values.

For newer architectures, transformers has lists of operations with names; for others, processors, and gguf the names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

FLOAT_TENSORS = (".ffn_gate_inp", ".shortconv.conv", ".ssm_conv1d")
"""Parts of names of small matrices that are used as floats: routers, and kernels of convolutions."""

EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Matrices of experts, each stacked in one tensor."""

PREDICTORS = "mtp."
"""Prefix of transformers' names of multi-token prediction heads, which are not part of the decoder."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def is_floats(name: str, dimensions: int) -> bool:
    """Return whether a tensor, by llama.cpp's name, becomes float32: vectors, and small matrices."""
    return dimensions == 1 or any(part in name for part in FLOAT_TENSORS)


class GgufLayout(ABC):
    """How a file of one architecture differs from transformers' model."""

    @abstractmethod
    def name(self, name: str) -> str | None:
        """Return the model's name of a file's tensor, with experts' gates and ups named separately; None if it is not
        needed. Raise ValueError for a tensor that must not be left out."""

    @abstractmethod
    def floats(self, name: str, values: Floats) -> Floats:
        """Convert a tensor's values to the model's."""

    @abstractmethod
    def rows(self, name: str, count: int) -> Numbers | None:
        """Return the order of the file's rows in the model; None if more than rows and columns must be reordered."""

    def columns(self, name: str) -> Numbers | None:
        """Return the order of a matrix's inputs that matches the file's columns; None if it is the model's."""
        return None

    def is_floats(self, name: str, dimensions: int, kind: str) -> bool:
        """Return whether a tensor becomes float32: vectors, and small matrices."""
        return is_floats(name, dimensions)


class TransformersLayout(GgufLayout):
    """The layout of files with transformers' names and order."""

    def name(self, name: str) -> str | None:
        return name

    def floats(self, name: str, values: Floats) -> Floats:
        return values

    def rows(self, name: str, count: int) -> Numbers | None:
        return np.arange(count)

    def is_floats(self, name: str, dimensions: int, kind: str) -> bool:
        return kind == "F32"


def layout_of(architecture: str, model: PreTrainedModel) -> GgufLayout:
    """Return the layout of an architecture's files, by llama.cpp's name."""
    if not has_operations(architecture):
        return ProcessorLayout(architecture, model)
    return OperationsLayout(get_gguf_conversion_mapping(architecture, model.config), model)


def has_operations(architecture: str) -> bool:
    """Return whether transformers has a list of operations for an architecture."""
    return architecture in GGUF_CONFIG_ARCHS


def predictor_mapping(architecture: str, config: PreTrainedConfig, block: int) -> list[WeightTransform]:
    """Return the operations from an MTP layer's tensors, the file's ``block``, to transformers' ``MtpModel``, whose
    ``config`` it is. llama.cpp's converter adds 1 to the layer's norms, including those named ``nextn``."""
    norms = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "post_norm"}
    return [
        WeightRenaming(rf"^blk\.{block}\.nextn\.", "layers.0."),
        WeightRenaming(rf"^blk\.{block}\.", "layers.0.mtp_block."),
        *get_gguf_conversion_mapping(architecture, config),
        *(
            WeightConverter(rf"^layers\.0\.{theirs}\.weight", f"layers.0.{ours}.weight", operations=[SubtractOne()])
            for theirs, ours in norms.items()
        ),
    ]


class ProcessorLayout(GgufLayout):
    """The layout by transformers' processors and gguf's names. Orders are found by processing row numbers."""

    def __init__(self, architecture: str, model: PreTrainedModel) -> None:
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        table = get_tensor_name_map(arch, model.config.num_hidden_layers)
        ours = [each for name, _ in model.named_parameters() for each in _separate(name)]
        theirs = [table.get_name(name, (".weight", ".bias")) for name in ours]
        theirs = [f"{name}.weight" if name is not None and name.endswith("_exps") else name for name in theirs]
        self._names = {there: here for there, here in zip(theirs, ours, strict=True) if there is not None}

    def name(self, name: str) -> str | None:
        return self._names.get(name)

    def floats(self, name: str, values: Floats) -> Floats:
        return np.array(self._processor.process(values, name).weights, np.float32, order="C")

    def rows(self, name: str, count: int) -> Numbers | None:
        numbers = np.arange(count)
        order = self._processor.process(numbers[:, None], name).weights
        only_rows = order.shape == (count, 1) and np.array_equal(np.sort(order[:, 0]), numbers)
        return order[:, 0] if only_rows else None


class OperationsLayout(GgufLayout):
    """The layout by transformers' lists of operations. Orders are found by applying them to row numbers."""

    def __init__(self, mapping: list[WeightTransform], model: PreTrainedModel) -> None:
        mapping = deepcopy(mapping)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._parameters = {each for name, _ in model.named_parameters() for each in _separate(name)}

    def name(self, name: str) -> str | None:
        found, pattern = rename_source_key(name, self._renamings, self._converters)
        if pattern is not None and found.endswith("gate_up_proj"):
            part = EXPERTS[self._converter(pattern).source_patterns.index(pattern)]
            found = f"{found.removesuffix('gate_up_proj')}{part}"
        if found not in self._parameters and not found.startswith(PREDICTORS):
            raise ValueError(f"tensor {name} has no place in the model, and without it the model would differ")
        return found if found in self._parameters else None

    def floats(self, name: str, values: Floats) -> Floats:
        tensor = torch.from_numpy(values)
        for operation in self._operations(name):
            tensor = _applied(operation, tensor)
        return tensor.contiguous().numpy()

    def rows(self, name: str, count: int) -> Numbers | None:
        numbers = torch.arange(count)[:, None]
        order = numbers
        for operation in self._operations(name):
            if not getattr(operation, "supports_packed", False):
                return None
            if not hasattr(operation, "input_permutation"):
                order = _applied(operation, order)
        only_rows = order.shape == numbers.shape and torch.equal(order[:, 0].sort().values, numbers[:, 0])
        return order[:, 0].numpy() if only_rows else None

    def columns(self, name: str) -> Numbers | None:
        orders = [each.input_permutation for each in self._operations(name) if hasattr(each, "input_permutation")]
        if len(orders) > 1:
            raise ValueError(f"tensor {name} has its columns reordered twice")
        return orders[0].numpy() if orders else None

    def _operations(self, name: str) -> list[Any]:
        _, pattern = rename_source_key(name, self._renamings, self._converters)
        found = [] if pattern is None else self._converter(pattern).operations
        return [each for each in found if not isinstance(each, Concatenate)]

    def _converter(self, pattern: str) -> Any:
        return next(each for each in self._converters if pattern in each.source_patterns)


def _applied(operation: Any, tensor: torch.Tensor) -> torch.Tensor:
    (made,) = operation.convert({"x": [tensor]}, source_patterns=["x"], target_patterns=["x"]).values()
    return made  # type: ignore[no-any-return]


def _separate(name: str) -> tuple[str, ...]:
    """Return the names of the matrices that a parameter of transformers stacks: experts' gates and ups."""
    owner, _, leaf = name.rpartition(".")
    return tuple(f"{owner}.{part}" for part in EXPERTS[:2]) if leaf == "gate_up_proj" else (name,)
