"""Products in Triton's interpreter: of bfloat16, which it keeps as 16-bit integers and would multiply as these; and in
an order of sums that does not depend on the tile, as on a GPU. That of numpy's own products does on some processors.
"""

from typing import Any

import numpy as np
import pytest


def interpret_products(patch: pytest.MonkeyPatch) -> None:
    """Let ``tl.dot`` multiply the numbers that bfloat16 stands for, and add in order."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x.data
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        products = wide(a).astype(d.data.dtype)[..., None] * wide(b).astype(d.data.dtype)[..., None, :, :]
        return TensorHandle(np.add.reduce(products, -2) + d.data, d.dtype.scalar)  # one column after the other

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def interpret_quickly(patch: pytest.MonkeyPatch) -> None:
    """Let kernels load one thing after the other, which changes no bit: the interpreter does nothing ahead."""
    import triton.language as tl

    from forerun.kernels.gpu import attend, decoder_ops

    patch.setattr(attend, "GPU_COMBINE_SPLITS", 1)
    patch.setattr(decoder_ops, "PARTS_AHEAD", tl.constexpr(1))
