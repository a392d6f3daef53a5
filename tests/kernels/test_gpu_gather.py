"""Chunks that the GPU gathers itself, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from forerun.kernels.gpu.gather import gather_chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_those_of_their_heads(dtype):
    """Of rows with gaps between heads, and of a width that is no power of two; none at all is no launch."""
    rows = torch.randn(1, 3, 43, 24).to(dtype)[:, :, 3:]
    head, chunk = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 4, 1, 3])
    found = gather_chunks(rows, head, chunk, 8, torch.device("cpu"))
    right = torch.stack([rows[0, h, 8 * c : 8 * c + 8] for h, c in zip(head.tolist(), chunk.tolist(), strict=True)])
    assert torch.equal(found, right)
    assert gather_chunks(rows, head[:0], chunk[:0], 8, torch.device("cpu")).shape == (0, 8, 24)
