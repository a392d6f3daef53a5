"""The kernels' results beside float64, and whether a token's bits depend on what shares its pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.capacity.shapes import ModelShape
from forerun.bench.machine import Row
from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.recurrent.gated_states import GatedShape, TokenOrder, run_states
from forerun.kernels.recurrent.short_convolution import convolve


def product(shape: ModelShape, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Row:
    """Check a matrix product: all tokens at once beside passes of these sizes."""
    from forerun.kernels.gpu import linear

    x, weight = (_random(*size).to(device, dtype) for size in ((max(sizes) + 1, shape.hidden), (61, shape.hidden)))
    whole = linear.product(x, weight)
    same = all(torch.equal(linear.product(x[:n], weight), whole[:n]) for n in sizes)
    return _row("product", dtype, whole, x.double() @ weight.double().T, same)


def attention(shape: ModelShape, context: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Row:
    """Check the attention of the last tokens: in one pass beside passes of these sizes."""
    size, count = shape.head_dim, max(sizes)
    text = _random(2, shape.kv_heads, context + count, size).to(device, dtype)
    q = _random(1, shape.heads, count, size).to(device, dtype)
    whole = attention_call(q, *text, context)()
    same = all(torch.equal(attention_call(q[:, :, :n].contiguous(), *text, context)(), whole[:, :, :n]) for n in sizes)
    keys, values = text[:, None].double().repeat_interleave(shape.heads // shape.kv_heads, 2)
    seen = torch.ones(count, context + count, dtype=torch.bool, device=device).tril(context)
    right = functional.scaled_dot_product_attention(q.double(), keys, values, seen, scale=size**-0.5)
    return _row(f"attention at {context:,} tokens", dtype, whole, right, same)


RECURRENCES = {
    "short convolution": None,
    "gated delta rule": GatedShape(16, 32, 128, 128, 1, True, True, 128**-0.5),
    "gated delta rule, a gate per channel": GatedShape(16, 16, 128, 128, 128, True, True, 128**-0.5),
    "Mamba-2": GatedShape(1, 48, 128, 64, 1, False, False, 1.0),
}
"""As in Qwen3.5, Kimi Linear and Granite 4 H; the convolution is LFM2's."""
CONVOLVED_CHANNELS, CONVOLVED_TAPS = 2048, 3
RECURRENT_TREE = np.array([-1, 0, 1, 2, 2, 1, 5, 0, 7, 3, 3, 4, 8])
"""Parents: among them a branch, a sibling whose parent is far back, a leaf, and a parent of three."""


def recurrence(name: str, device: torch.device, divisor: int = 1) -> Row:
    """Check a recurrent layer over a tree, beside float64 on the CPU, and each node alone with its ancestors.
    ``divisor`` reduces heads and channels, as the interpreter is slow."""
    shape = RECURRENCES[name]
    if shape is None:
        inputs = _convolution_inputs(CONVOLVED_CHANNELS // divisor)
        run = _convolve
    else:
        shape = shape._replace(key_heads=-(-shape.key_heads // divisor), heads=-(-shape.heads // divisor))
        inputs = _state_inputs(shape)
        run = partial(_run_states, shape)
    there = [each.to(device) for each in inputs]
    whole = run(there, RECURRENT_TREE)
    right = run([each.double() for each in inputs], RECURRENT_TREE)
    same = all(
        torch.equal(run([there[0][path], there[1][path], *there[2:]], np.arange(-1, len(path) - 1))[-1], whole[node])
        for node, path in enumerate(map(_path_to, range(len(RECURRENT_TREE))))
    )
    return _row(name, torch.float32, whole.cpu(), right, same)


def _path_to(node: int) -> list[int]:
    """Return a node with its ancestors, in order."""
    path = [node]
    while RECURRENT_TREE[path[0]] >= 0:
        path.insert(0, int(RECURRENT_TREE[path[0]]))
    return path


def _state_inputs(shape: GatedShape) -> list[torch.Tensor]:
    rows = _random(len(RECURRENT_TREE), shape.row_width)
    gates = shape.key_heads * shape.dim + shape.heads * shape.out_dim
    rows[:, gates : gates + shape.heads * shape.gates].abs_().neg_()  # logarithms of decays
    return [rows, _random(len(rows), shape.key_heads, shape.dim), _random(shape.heads, shape.dim, shape.out_dim)]


def _run_states(shape: GatedShape, inputs: Sequence[torch.Tensor], parents: IntArray) -> torch.Tensor:
    rows, q, state = inputs
    order = TokenOrder.of(parents, {}, rows.device)
    return run_states(shape, rows.contiguous(), q.contiguous(), state, state[None, :0], order)


def _convolution_inputs(channels: int) -> list[torch.Tensor]:
    """Return tokens of the tree, no gates, tokens before it, and weights."""
    n = len(RECURRENT_TREE)
    before, weights = _random(CONVOLVED_TAPS - 1, channels), _random(CONVOLVED_TAPS, channels)
    return [_random(n, channels), torch.zeros(n, 0), before, weights]


def _convolve(inputs: Sequence[torch.Tensor], parents: IntArray) -> torch.Tensor:
    tokens, _, before, weights = inputs
    first = len(before)
    above = torch.from_numpy(np.concatenate((np.arange(-1, first - 1), parents + first))).to(tokens.device)
    return convolve(torch.cat((before, tokens)), weights, None, above, first)


def attention_call(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int
) -> Callable[[], torch.Tensor]:
    """Return a layer's attention, to be called: queries ``[1, H, n, d]`` after ``context`` keys ``[Hkv, room, d]``."""
    from forerun.kernels.gpu import attend
    from forerun.kernels.gpu.pass_tables import PassDescription, PassTables, scan_programs

    block = Block(np.zeros(1, np.int64), DraftTree.chain(np.arange(q.shape[2] - 1)), context)
    addresses = np.array([[[keys.data_ptr(), values.data_ptr()]]])
    strides = np.array([[[*keys.stride()[:2], *values.stride()[:2]]]])
    group, programs = q.shape[1] // len(keys), scan_programs(q.device, len(keys))
    places = PassTables.of(PassDescription([block], addresses, strides, group, programs), q.device)
    spec = AttentionSpec(q.shape[3] ** -0.5)

    def work(held: tuple[torch.Tensor, torch.Tensor] = (keys, values)) -> torch.Tensor:  # tables have addresses only
        return attend.attend(0, q, len(held[0]), places, spec)

    return work


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _row(kernel: str, dtype: torch.dtype, found: torch.Tensor, right: torch.Tensor, same: bool) -> Row:
    error = float((found.double() - right).abs().max() / right.abs().max())
    return {"kernel": kernel, "dtype": str(dtype), "relative_error": error, "same_bits": same}
