"""Changes the memory layout of weights that are stored transposed to what kernels read.

Some layers keep a matrix as ``[K, O]`` and compute ``x @ weight``: GPT-2's, and the experts of gpt-oss. When a model is
admitted, such weights are rearranged in memory, once. Shape and numbers stay, so the model computes and is saved as
before, and nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forerun.kernels.linear import ordered_modules
from forerun.models.forward.sharded import is_sharded


def lay_out(model: PreTrainedModel) -> None:
    """Rearrange all such weights of a model that is whole."""
    for weight in () if is_sharded(model) else _turned(model):
        ordered_modules.lay_out(weight)


def _turned(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, Conv1D):
            yield module.weight
        elif getattr(module, "is_transposed", False):  # experts; transformers marks them with this attribute
            yield from (weight for weight in module.parameters(recurse=False) if weight.dim() == 3)
