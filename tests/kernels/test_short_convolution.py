"""A program's short convolution: the formula over several rows with trees, and the bits of a token alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree
from forerun.kernels.attention.packed_pass import HeadShape, PackedPass
from forerun.kernels.recurrent.short_convolution import GATED_CONVOLUTION, GatedConvolutionOp, scratch_bytes
from forerun.kernels.runtime.executor import Program

CHANNELS, HEADS = 176, HeadShape(1, 1, 16, 16)  # two tasks, and the second is shorter
TREE = DraftTree(np.arange(7), np.array([ROOT, 0, ROOT, 2, 2, 4, 0]))
BLOCKS = [
    Block(np.arange(3), TREE, 0),
    Block(np.arange(1), DraftTree.chain(np.arange(4)), 0),
    Block(np.arange(1), DraftTree.empty(), 0),
]


def run(blocks: Sequence[Block], x: torch.Tensor, histories: list[torch.Tensor], conv: torch.nn.Conv1d) -> torch.Tensor:
    """Outputs ``[n, CHANNELS]``; inputs are written behind what ``histories`` begin with."""
    packed = PackedPass(blocks, HEADS, 2)
    places = np.array([history.data_ptr() for history in histories])
    out = torch.full((packed.n, CHANNELS), torch.nan, dtype=conv.weight.dtype)
    op = GatedConvolutionOp(
        int(conv.weight.dtype == torch.bfloat16), x.data_ptr(), x.stride(0) * 4, CHANNELS, conv.kernel_size[0],
        conv.weight.data_ptr(), 0 if conv.bias is None else conv.bias.data_ptr(), places.ctypes.data, out.data_ptr(),
        out.stride(0) * out.element_size(),
    )  # fmt: skip
    size = scratch_bytes(conv.kernel_size[0]) // 64 * 64 + 64
    slots = torch.empty(2 * size, dtype=torch.uint8)
    fields = {**packed.fields(), "slots": slots.data_ptr(), "slot_size": size}
    Program([(GATED_CONVOLUTION, op)]).run(2, **fields)
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("taps", [3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_the_formulas(dtype, taps, bias):
    torch.manual_seed(taps)
    conv = torch.nn.Conv1d(CHANNELS, CHANNELS, taps, groups=CHANNELS, bias=bias).to(dtype).requires_grad_(False)
    x, before = torch.randn(sum(map(len, BLOCKS)), 3 * CHANNELS), taps - 1
    histories = [
        torch.cat((torch.randn(before, CHANNELS), torch.full((len(block), CHANNELS), torch.nan))) for block in BLOCKS
    ]
    begins = [history[:before].clone() for history in histories]
    found, first = run(BLOCKS, x, histories, conv), 0
    weight, offset = conv.weight.double()[:, 0], 0.0 if conv.bias is None else conv.bias.double()
    for block, history, begin in zip(BLOCKS, histories, begins, strict=True):
        gate_in, gate_out, own = x[first : first + len(block)].double().split(CHANNELS, 1)
        assert torch.equal(history[before:], (gate_in * own).float())
        pending = len(block.pending)
        for token in range(len(block)):
            path = [token]
            while path[0] > 0:
                tree = path[0] >= pending
                parent = int(block.tree.parents[path[0] - pending]) if tree else path[0] - 1 - pending
                path.insert(0, pending - 1 if tree and parent == ROOT else pending + parent)
            seen = torch.cat((begin.double(), (gate_in * own)[path]))[-taps:]
            right = gate_out[token] * ((seen * weight.t()).sum(0) + offset)
            limits = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
            torch.testing.assert_close(found[first + token].double(), right, **limits)
        alone = torch.cat((begin, torch.full((len(block), CHANNELS), torch.nan)))
        part = x[first : first + len(block)].contiguous()
        assert torch.equal(run([block], part, [alone], conv), found[first : first + len(block)])
        first += len(block)
