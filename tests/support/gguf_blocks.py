"""Rows of random blocks in every format of GGUF that there is a kernel for."""

import numpy as np
import pytest
import torch

from forerun.kernels.linear.gguf_formats import GGUF_FORMATS

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")

NAMES = [each.name for each in GGUF_FORMATS]
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block's float16 are."""


def blocks(name: str, outs: int, columns: int, seed: int = 0, scale: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of random blocks, and the floats that gguf makes of them; every bit pattern of the small integers occurs."""
    which = NAMES.index(name)
    kind = gguf.GGMLQuantizationType(GGUF_FORMATS[which].number)
    rng = np.random.default_rng(seed)
    count = columns // GGUF_FORMATS[which].words
    raw = rng.integers(0, 256, (outs, count, GGUF_FORMATS[which].bytes), np.uint8)
    for at in SCALES.get(name, ()):
        scales = (rng.standard_normal((outs, count)) * scale).astype(np.float16)
        raw[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    if name == "MXFP4":  # powers of two
        raw[:, :, 0] = rng.integers(118, 126, (outs, count))
    if name in ("F32", "F16", "BF16"):
        exact = (rng.standard_normal((outs, columns)) * 0.3).astype(np.float32)
        rows = gguf.quants.quantize(exact, kind).view(np.uint8)
    else:
        rows = raw.reshape(outs, -1)
    return torch.from_numpy(rows.copy()), torch.from_numpy(gguf.dequantize(rows, kind).astype(np.float32).copy())
