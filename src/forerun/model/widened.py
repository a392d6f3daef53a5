"""A model's forward pass with less rounding: weights of 16 bits, sums of 32, and no second copy of the model.

What two passes in bfloat16 are compared with, when they differ and neither is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

NARROW = (torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """Inside, functions get floats of 16 bits as float32, one tensor at a time, and so give float32.

    What changes a tensor in its place is left as it is, and so is what is asked to give a type: numbers that a model
    rounds on purpose are rounded.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        name = getattr(func, "__name__", "")
        if name in KEPT or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


KEPT = frozenset({"__get__", "__set__", "__setitem__", "to", "type", "type_as", "bfloat16", "half"})
"""Functions that read or write a tensor's properties, or change its type."""


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in NARROW else value
