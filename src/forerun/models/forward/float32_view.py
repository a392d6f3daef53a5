"""A 16-bit model's forward pass in float32, without a second copy of the model.

It is the reference when two passes in bfloat16 differ, since both of them are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Float32View(TorchFunctionMode):
    """A context in which functions get 16-bit floats widened to float32, one tensor at a time, and so return float32.

    Functions that change a tensor in place are left alone. So are conversions to a type: where a model rounds on
    purpose, it still rounds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in UNWIDENED or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


UNWIDENED = frozenset({"__get__", "__set__", "__setitem__", "to", "type", "type_as", "bfloat16", "half"})
"""Functions that read or write a tensor's properties, or change its type."""


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN_BIT else value
