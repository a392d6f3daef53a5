"""Copy a model with quantised matrices, to draft for it: its own weights in fewer bytes, read in less time."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize
from torch import nn
from transformers import PreTrainedModel

from forerun.kernels.runtime.vector_ir import unusable
from forerun.models.forward.architecture import dtype_name, is_stored
from forerun.models.forward.scorer import is_sharded
from forerun.models.loading.stored_weights import StoredEmbedding, StoredLinear

NUMBERS_AT_ONCE = 1 << 22
"""Numbers quantised at once: some 100 MB of temporary arrays."""
TYPES = (torch.float32, torch.bfloat16)


def stored_copy(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Return a copy with linear layers and the embedding in format ``kind`` of GGUF, and the rest in float32.

    Raise ValueError with the reason if there is no kernel for such a copy, or it would not be smaller.
    """
    what = f"a copy in {kind} cannot draft for this {type(model).__name__}"
    if model.device.type != "cpu" or is_sharded(model):
        raise ValueError(f"{what}: it must be on one CPU, in one process; it is on {model.device}")
    if (reason := unusable()) is not None:
        raise ValueError(f"{what}: there is no kernel for it here ({reason})")
    if model.dtype not in TYPES or is_stored(model):
        raise ValueError(f"{what}, whose type is {dtype_name(model)}; allowed are float32 and bfloat16")
    packing = GGMLQuantizationType[kind.upper()]
    block, _ = GGML_QUANT_SIZES[packing]
    shared = {id(weight): weight for weight in model.parameters()}
    made: PreTrainedModel = deepcopy(model, dict(shared))  # the parameters themselves are not copied
    embedding, rows = made.get_input_embeddings(), dict[int, nn.Parameter]()
    for name, module in [*made.named_modules()]:
        if isinstance(module, nn.Linear) or module is embedding:
            weight: Any = module.weight
            if weight.shape[1] % block:
                raise ValueError(f"{what}: {name} has {weight.shape[1]} columns; allowed are multiples of {block}")
            if id(weight) not in rows:
                rows[id(weight)] = nn.Parameter(_quantised(weight, packing), requires_grad=False)
            made.set_submodule(name, _stored(module, rows[id(weight)], packing.name))
        else:
            for own, weight in [*module.named_parameters(recurse=False)]:
                setattr(module, own, _floats(weight))
    sizes = [sum(weight.nbytes for weight in each.parameters()) for each in (model, made)]
    if sizes[1] >= sizes[0]:
        raise ValueError(f"{what}: it would have {sizes[1]:,} bytes, and the model has {sizes[0]:,}")
    made.config.dtype = torch.float32
    return made


def _quantised(weight: torch.Tensor, packing: GGMLQuantizationType) -> torch.Tensor:
    pieces = torch.split(weight.detach(), max(1, NUMBERS_AT_ONCE // weight.shape[1]))
    return torch.from_numpy(np.concatenate([quantize(piece.float().numpy(), packing) for piece in pieces]))


def _floats(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().float(), requires_grad=False)


def _stored(module: Any, rows: nn.Parameter, kind: str) -> nn.Module:
    if isinstance(module, nn.Linear):
        bias = None if module.bias is None else _floats(module.bias)
        return StoredLinear(rows, kind, module.in_features, bias, quantised=True)
    return StoredEmbedding(rows, kind, module.embedding_dim, getattr(module, "embed_scale", None))
