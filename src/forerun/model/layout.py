"""Weights of a model that lie the other way round in memory than kernels read them.

Some layers keep a matrix as ``[K, O]`` and multiply tokens by it, ``x @ weight``: GPT-2's, and the experts of gpt-oss.
Once, when a model is admitted, such weights are put into the other order. They keep their shape and their numbers, so
the model computes and is saved as before; nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forerun.kernels import ordered


def lay_out(model: PreTrainedModel) -> None:
    """Put all such weights of a model into the order that kernels read."""
    for weight in _turned(model):
        ordered.lay_out(weight)


def _turned(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Conv1D):
            yield module.weight
        elif getattr(module, "is_transposed", False):  # experts, as transformers marks them
            yield from (weight for weight in module.parameters(recurse=False) if weight.dim() == 3)
