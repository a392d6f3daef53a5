"""Triton's interpreter keeps bfloat16 as 16-bit integers, and its ``tl.dot`` would multiply these integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def interpret_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let ``tl.dot`` multiply the numbers that bfloat16 stands for."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
