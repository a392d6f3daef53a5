"""Load a GGUF file's weights in their quantised form: mapped from the file, never dequantised.

Modules of ``stored_weights.py`` over the file's bytes replace linear layers, embeddings and experts. Rows in another
order than transformers' (queries and keys of Llama) are copied; for other columns (Qwen3.5), the layer's inputs are
reordered. Norms, biases, routers and kernels of convolutions become float32. See ``gguf_layout.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from forerun.kernels.linear.gguf_formats import GGUF_FORMATS
from forerun.kernels.runtime.vector_ir import unusable
from forerun.models.loading.gguf import Header, Progress, Tensor, counted, is_mixtral
from forerun.models.loading.gguf_layout import EXPERTS, GgufLayout, is_floats, layout_of
from forerun.models.loading.load import check_complete
from forerun.models.loading.stored_weights import InputOrder, StoredEmbedding, StoredExperts, StoredLinear

BLOCK_COLUMNS = {each.name: each.words for each in GGUF_FORMATS}
"""Columns per block, by the name of a format with a kernel."""
INSTEAD = "--dtype bfloat16 dequantises it"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def check_formats(file: Path, header: Header) -> None:
    """Raise ValueError if a quantised matrix has no kernel; read only the header."""
    if (reason := unusable()) is not None:
        raise ValueError(f"there is no kernel for stored weights here: {reason}; {INSTEAD}")
    for name, tensor in header.tensors.items():
        kind, columns = GGMLQuantizationType(tensor.kind).name, tensor.shape[0]
        if is_floats(name, len(tensor.shape)):
            continue
        if kind not in BLOCK_COLUMNS:
            raise ValueError(
                f"{file}: there is no kernel for {kind}, the format of tensor {name}; there are kernels for "
                f"{', '.join(BLOCK_COLUMNS)}; {INSTEAD}"
            )
        if columns % BLOCK_COLUMNS[kind]:
            raise ValueError(
                f"{file}: rows of tensor {name} have {columns} numbers, and the kernel for {kind} needs a multiple of "
                f"{BLOCK_COLUMNS[kind]}; {INSTEAD}"
            )


def load_as_stored(
    file: Path,
    header: Header,
    config: PreTrainedConfig,
    progress: Progress = lambda done, total: None,
    layout: GgufLayout | None = None,
    *,
    quantised: bool = True,
) -> PreTrainedModel:
    """Load a decoder over the weights in a file that ``gguf.check`` and ``check_formats`` accepted.

    ``layout``: by default that of llama.cpp's files. ``quantised``: whether inputs of linear layers and experts are
    quantised to eight bits; see ``linear.Weights``. Raise ValueError with the reason if the file cannot be used.
    """
    config = _mixtral(config, header) if is_mixtral(header) else config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_buffers(file, model)
    fill(file, header, model, layout or layout_of(header.architecture, model), progress, quantised=quantised)
    model.name_or_path = str(file)
    return model.requires_grad_(False)


def fill(
    file: Path,
    header: Header,
    model: PreTrainedModel,
    layout: GgufLayout,
    progress: Progress = lambda done, total: None,
    *,
    quantised: bool,
) -> None:
    """Put a file's tensors into a model without weights; raise ValueError for misfits and missing weights."""
    _Filler(file, header, model, quantised, layout).fill(progress)


def _mixtral(config: PreTrainedConfig, header: Header) -> PreTrainedConfig:
    """Convert Llama's configuration, which transformers reads from Mixtral's files, to Mixtral's."""
    common = MixtralConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    shared = {key: value for key, value in config.to_dict().items() if key in common}
    count, used = (header.metadata[f"llama.expert_{key}"] for key in ("count", "used_count"))
    return MixtralConfig(**{**shared, "num_local_experts": count, "num_experts_per_tok": used})


def _fill_buffers(file: Path, model: PreTrainedModel) -> None:
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
                raise ValueError(
                    f"{file}: {type(module).__name__}.{name} cannot be computed without its weights; {INSTEAD}"
                )


def floats_of(data: Bytes, header: Header, tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Dequantise a tensor of a file mapped as ``data``, in torch's order of dimensions."""
    floats = dequantize(_rows(data, header, tensor), GGMLQuantizationType(tensor.kind))
    return np.asarray(floats, np.float32).reshape(tensor.shape[::-1])


def _rows(data: Bytes, header: Header, tensor: Tensor) -> Bytes:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    begin, count = header.data + tensor.offset, prod(tensor.shape[1:])
    row = tensor.shape[0] // block * size
    return data[begin : begin + count * row].reshape(count, row)


@dataclass
class _Filler:
    file: Path
    header: Header
    model: PreTrainedModel
    quantised: bool
    layout: GgufLayout

    def __post_init__(self) -> None:
        self._data = np.memmap(self.file, np.uint8, "c")
        self._matrices: dict[str, tuple[nn.Parameter, str, int]] = {}
        self._orders: dict[str, torch.Tensor] = {}  # of the inputs of linear layers, by their names

    def fill(self, progress: Progress) -> None:
        for name, tensor in counted([*self.header.tensors.items()], progress):
            if (ours := self.layout.name(name)) is not None:
                self._take(name, ours, tensor)
        for name, module in [*self.model.named_modules()]:
            if isinstance(module, nn.Linear | nn.Embedding):
                self._exchange(name, module)
            elif f"{name}.{EXPERTS[0]}" in self._matrices:
                self._exchange_experts(name, module)
        check_complete(self.file, sorted(name for name, each in self.model.named_parameters() if each.is_meta))

    def _take(self, name: str, ours: str, tensor: Tensor) -> None:
        owner, _, leaf = ours.rpartition(".")
        module: Any = self.model.get_submodule(owner)
        kind = GGMLQuantizationType(tensor.kind).name
        if self.layout.is_floats(name, len(tensor.shape), kind):
            weights = self._floats(name, tensor)
            self._check_shape(name, weights.shape, getattr(module, leaf).shape)
            setattr(module, leaf, nn.Parameter(torch.from_numpy(weights), requires_grad=False))
            return
        if leaf in EXPERTS:
            expected = self._shape_of_experts(name, module, leaf)
        elif isinstance(module, nn.Linear | nn.Embedding) and leaf == "weight":
            expected = module.weight.shape
        else:
            raise ValueError(f"{self.file}: tensor {name} does not belong to a plain linear layer; {INSTEAD}")
        self._check_shape(name, tensor.shape[::-1], expected)
        stored = self._in_order(name, _rows(self._data, self.header, tensor))
        rows = torch.from_numpy(stored).view(*expected[:-1], -1)
        self._matrices[ours] = nn.Parameter(rows, requires_grad=False), kind, tensor.shape[0]
        columns = self.layout.columns(name)
        if columns is not None and not np.array_equal(columns, np.arange(len(columns))):
            self._orders[owner] = torch.from_numpy(columns)

    def _floats(self, name: str, tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self.layout.floats(name, floats_of(self._data, self.header, tensor))

    def _shape_of_experts(self, name: str, module: Any, leaf: str) -> torch.Size:
        """Return the shape ``[E, O, K]`` of one matrix of experts; reject experts other than three matrices each."""
        parts: dict[str, torch.Size] = {part: parameter.shape for part, parameter in module.named_parameters()}
        usual = getattr(module, "is_concatenated", False) and not getattr(module, "is_transposed", True)
        gated = getattr(type(module), "_apply_gate", None) is _default_apply_gate
        if not (usual and gated) or parts.keys() != {"gate_up_proj", "down_proj"} or module.has_post_expert_norm:
            raise ValueError(
                f"{self.file}: tensor {name} belongs to experts that are not gated linear units; {INSTEAD}"
            )
        if leaf == "down_proj":
            return parts[leaf]
        count, both, columns = parts["gate_up_proj"]
        return torch.Size((count, both // 2, columns))

    def _check_shape(self, name: str, there: tuple[int, ...], expected: torch.Size) -> None:
        if tuple(there) != tuple(expected):
            raise ValueError(f"{self.file}: tensor {name} has the shape {[*there]}, and the model's is {[*expected]}")

    def _in_order(self, name: str, rows: Bytes) -> Bytes:
        order = self.layout.rows(name, len(rows))
        if order is None:
            raise ValueError(f"{self.file}: tensor {name} needs more than reordered rows; {INSTEAD}")
        return rows if np.array_equal(order, np.arange(len(rows))) else np.ascontiguousarray(rows[order])

    def _exchange(self, name: str, module: nn.Linear | nn.Embedding) -> None:
        """Replace a module by one over stored weights; a head without weights shares the embedding's."""
        matrix = self._matrices.get(f"{name}.weight")
        if matrix is None and module is self.model.get_output_embeddings() and self.model.config.tie_word_embeddings:
            inputs = self.model.get_input_embeddings()
            embedding = next(each for each, owner in self.model.named_modules() if owner is inputs)
            matrix = self._matrices[f"{embedding}.weight"]
        if matrix is None:
            return
        rows, kind, columns = matrix
        if isinstance(module, nn.Linear):
            made: nn.Module = StoredLinear(rows, kind, columns, module.bias, quantised=self.quantised)
            if (order := self._orders.get(name)) is not None:
                made = nn.Sequential(InputOrder(order), made)
        else:
            made = StoredEmbedding(rows, kind, columns, getattr(module, "embed_scale", None))
        self.model.set_submodule(name, made)

    def _exchange_experts(self, name: str, module: Any) -> None:
        matrices = [self._matrices.get(f"{name}.{part}") for part in EXPERTS]
        if None not in matrices:
            gate, up, down = ((rows, kind) for rows, kind, _ in filter(None, matrices))
            self.model.set_submodule(name, StoredExperts(gate, up, down, module.act_fn, quantised=self.quantised))
