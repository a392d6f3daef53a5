"""Attention in one order: right, and a token's output the same bits wherever and beside whatever it is computed."""

import itertools
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree
from forerun.kernels.attention.attention import AttentionSpec, attend_in_order
from forerun.kernels.attention.attention_fields import AttendOp
from forerun.kernels.attention.ordered_attention import COMBINE, SCAN
from forerun.kernels.attention.packed_pass import HeadShape, PackedPass
from forerun.kernels.linear.weight_format import multiplies_pairs
from forerun.kernels.runtime import executor, vector_ir

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BORDERS = (0, 1, 31, 32, 33, 63, 255, 256, 257, 600)
"""Committed tokens around the borders of blocks and pieces."""


@dataclass(frozen=True)
class Case:
    """What a layer asks, and the type of its cache."""

    heads: int = 2
    kv_heads: int = 2
    dim: int = 64
    out_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.2


CASES = [
    Case(), Case(2, 1, dtype=torch.bfloat16), Case(3, 1, window=100),
    Case(8, 2, 80, 80, dtype=torch.float16, softcap=3.0), Case(8, 1, 16, 16, sinks=True, window=40),
    Case(4, 2, 128, 128, dtype=torch.bfloat16, window=256, sinks=True, softcap=2.0),
    Case(3, 3, 192, 128, scale=0.1), Case(5, 1, 32, 48, window=1), Case(8, 1, 16, 16, softcap=2.0),
    Case(6, 1, 48, 80, dtype=torch.bfloat16, softcap=3.0), Case(3, 3, 16, 32, dtype=torch.bfloat16),
]  # fmt: skip


class Text:
    """Queries ``[t, H, d]``, and keys and values ``[Hkv, t, d]`` as a cache keeps them, of a text's positions."""

    def __init__(self, case: Case, length: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, case.heads, case.dim, generator=draw)
        self.k = torch.randn(case.kv_heads, length, case.dim, generator=draw).to(case.dtype)
        self.v = torch.randn(case.kv_heads, length, case.out_dim, generator=draw).to(case.dtype)

    def fed(self, block: Block, places: Sequence[int], wrong: "Text") -> "Fed":
        """A pass over a block behind the text's beginning; its token i is that of ``places[i]``, -1 for a wrong one."""

        def tokens(name: str, axis: int) -> torch.Tensor:
            each = ((self, p) if p >= 0 else (wrong, i) for i, p in enumerate(places))
            return torch.stack([getattr(text, name).select(axis, at) for text, at in each], axis)

        k, v = (torch.cat((getattr(self, name)[:, : block.start], tokens(name, 1)), 1) for name in "kv")
        return Fed(block, tokens("q", 0), k, v)


@dataclass
class Fed:
    """One row of a pass: queries ``[n, H, d]`` of its block, and keys and values with those that are committed."""

    block: Block
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sinks_of(case: Case) -> torch.Tensor | None:
    return torch.linspace(-1, 2, case.heads) if case.sinks else None


def attend(case: Case, fed: Sequence[Fed], out_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The kernel: outputs ``[n, H, dv]`` of each row."""
    threads = torch.get_num_threads()
    packed = PackedPass(
        [row.block for row in fed], HeadShape(case.heads, case.kv_heads, case.dim, case.out_dim), threads
    )
    size, strides = case.dtype.itemsize, []
    kv = np.array([[row.k.data_ptr(), row.v.data_ptr()] for row in fed], np.int64)
    for row in fed:
        assert row.k.is_contiguous() and row.v.is_contiguous()
        strides.append((row.k.stride(0) * size, row.k.stride(1) * size, row.v.stride(0) * size, row.v.stride(1) * size))
    q, sinks = torch.cat([row.q for row in fed]), sinks_of(case)
    out = torch.full((packed.n, case.heads, case.out_dim), torch.nan, dtype=out_dtype)
    fields = (
        KINDS[case.dtype], size, case.heads, case.kv_heads, case.dim, case.out_dim, case.window or 0, q.data_ptr(),
        q.stride(0) * 4, q.stride(1) * 4, kv.ctypes.data, 0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        out.stride(0) * out.element_size(), int(out_dtype == torch.bfloat16), case.scale / math.log(2),
        case.softcap or 0.0,
    )  # fmt: skip
    slot = -(-packed.slot_size // 64) * 64
    slots = torch.zeros(threads * slot + 64, dtype=torch.uint8)
    parts = torch.full((packed.states_bytes // 4 + 16,), torch.nan)  # nothing is read that was not written
    program = executor.Program([(each, AttendOp(*fields)) for each in (SCAN, COMBINE)])
    tables = packed.fields(strides)
    program.run(packed.threads, **tables, states=parts.data_ptr(), slots=slots.data_ptr(), slot_size=slot)
    return list(torch.split(out, packed.counts))


def by_definition(case: Case, row: Fed) -> torch.Tensor:
    """Softmax written out in float64, ``[n, H, dv]``; of queries rounded to bfloat16, where pairs are multiplied."""
    start, n = row.block.start, len(row.block)
    seen = torch.cat((torch.ones(n, start, dtype=torch.bool), torch.from_numpy(row.block.visible)), 1)
    if case.window:
        places = torch.cat((torch.arange(start), torch.from_numpy(row.block.positions)))
        seen &= places[None] > places[start:, None] - case.window
    group = case.heads // case.kv_heads
    k, v = (t.double().repeat_interleave(group, 0) for t in (row.k, row.v))
    q = row.q.bfloat16() if in_pairs(case) else row.q
    scores = torch.einsum("nhd,hmd->hnm", q.double(), k) * case.scale
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if case.sinks:
        sinks = sinks_of(case)
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), 2)
    weights = scores.softmax(-1)[:, :, : start + n]
    return torch.einsum("hnm,hmd->nhd", weights, v)


def chain(start: int, pending: int, drafted: int = 0) -> Block:
    return Block(np.arange(pending), DraftTree.chain(np.arange(drafted)), start)


def in_order(text: Text, start: int, pending: int, drafted: int = 0) -> Fed:
    """A pass over tokens in the order of the text."""
    places = range(start, start + pending + drafted)
    return text.fed(chain(start, pending, drafted), places, text)


def bushy(text: Text, wrong: Text, start: int, pending: int, depth: int, seed: int = 0) -> tuple[Fed, list[int]]:
    """A tree that holds the text's next ``depth`` tokens among wrong ones; and which tokens of the block are right."""
    draw = np.random.default_rng(seed)
    parents: list[int] = []
    right, path = list(range(pending)), [ROOT]
    places = list(range(start, start + pending))
    for _ in range(depth):
        for _ in range(draw.integers(0, 3)):
            parents.append(int(draw.integers(-1, len(parents))) if draw.random() < 0.5 else path[-1])
            places.append(-1)
        parents.append(path[-1])
        path.append(len(parents) - 1)
        right.append(pending + path[-1])
        places.append(start + pending + len(path) - 2)
    for _ in range(draw.integers(1, 4)):  # something behind, so that it is no chain
        parents.append(ROOT)
        places.append(-1)
    block = Block(np.arange(pending), DraftTree(np.arange(len(parents)), np.array(parents)), start)
    return text.fed(block, places, wrong), right


def in_pairs(case: Case) -> bool:
    return case.dtype == torch.bfloat16 and multiplies_pairs()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


def tolerance(case: Case, row: Fed) -> float:
    """What rounding allows: a weight of eight bits is wrong by at most 1 in 512, and so is the sum of weights."""
    return float(row.v.abs().max()) / 256 if in_pairs(case) else 5e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_softmax_written_out(case):
    text, wrong = Text(case, 760), Text(case, 100, 1)
    for start in BORDERS:
        fed = [in_order(text, start, 1), in_order(text, start, 3, 40), in_order(text, start, 130)]
        fed += [bushy(text, wrong, start, 1, depth, depth)[0] for depth in (0, 1, 7, 30)]
        fed += [bushy(text, wrong, start, 5, 34)[0]]
        for row in fed:
            assert error(attend(case, [row])[0], by_definition(case, row)) < tolerance(case, row)
        for found, row in zip(attend(case, fed), fed, strict=True):
            assert error(found, by_definition(case, row)) < tolerance(case, row)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_text_has_the_same_bits_however_it_is_cut(case):
    text, end = Text(case, 640), 640
    row = in_order(text, 0, end)
    whole = attend(case, [row])[0]
    assert error(whole, by_definition(case, row)) < tolerance(case, row)
    for size in (3, 32, 100, 257):
        for start in range(0, end, size):
            count = min(size, end - start)
            assert torch.equal(attend(case, [in_order(text, start, count)])[0], whole[start : start + count])
    for start in (0, 1, 30, 31, 32, 33, 255, 256, 257, 600, 638):
        assert torch.equal(attend(case, [in_order(text, start, 1)])[0], whole[start : start + 1])
        for drafted in (1, 40, 200):
            drafted = min(drafted, end - start - 1)
            found = attend(case, [in_order(text, start, 1, drafted)])[0]
            assert torch.equal(found, whole[start : start + 1 + drafted])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_of_a_tree_has_the_bits_of_the_text(case):
    """Around the borders of blocks, and in trees that go across a piece."""
    text, wrong = Text(case, 900), Text(case, 1200, 1)
    whole = attend(case, [in_order(text, 0, 900)])[0]
    trees = list(itertools.product(BORDERS, ((1, 1), (1, 5), (1, 40), (40, 3), (3, 70))))
    across = ((200, 400), (255, 258), (256, 257), (0, 300)) if case in CASES[1:6] else ()
    for start, (pending, depth) in [*trees, *((start, (1, depth)) for start, depth in across)]:
        fed, right = bushy(text, wrong, start, pending, depth, start + depth)
        assert torch.equal(attend(case, [fed])[0][right], whole[start : start + pending + depth]), (start, depth)


@given(
    case=st.sampled_from(CASES),
    rows=st.lists(
        st.tuples(st.integers(0, 600), st.integers(1, 45), st.integers(0, 40), st.booleans()), min_size=1, max_size=4),
    threads=st.integers(1, 5), seed=st.integers(0, 9),
)  # fmt: skip
def test_a_ragged_batch_has_the_bits_of_each_row_alone(case, rows, threads, seed):
    text, wrong = Text(case, 700), Text(case, 200, 1)
    given = [
        bushy(text, wrong, *row, seed) if branches else (in_order(text, *row), [*range(row[1] + row[2])])
        for *row, branches in rows
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = attend(case, [row for row, _ in given])
    torch.set_num_threads(before)
    for found, (row, places), (start, pending, depth, _) in zip(together, given, rows, strict=True):
        assert torch.equal(found, attend(case, [row])[0])
        assert torch.equal(found[places], attend(case, [in_order(text, start, pending + depth)])[0])


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_threads_change_nothing(case, monkeypatch):
    text, wrong = Text(case, 760), Text(case, 200, 1)
    fed = [in_order(text, 0, 700), bushy(text, wrong, 600, 1, 30)[0], in_order(text, 300, 1, 8)]
    torch.set_num_threads(1)
    alone = attend(case, fed)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(attend(case, fed), alone, strict=True))
    monkeypatch.setattr(executor, "openmp", lambda: None)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(attend(case, fed), alone, strict=True))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_grouped_heads_have_the_bits_of_heads_of_their_own(group):
    case = Case(2 * group, 2)
    text, wrong = Text(case, 400), Text(case, 100, 1)
    for row in (in_order(text, 0, 300), in_order(text, 290, 1, 20), bushy(text, wrong, 290, 1, 20)[0]):
        apart = replace(row, k=row.k.repeat_interleave(group, 0), v=row.v.repeat_interleave(group, 0))
        own = attend(replace(case, kv_heads=2 * group), [apart])[0]
        assert torch.equal(attend(case, [row])[0], own)


def test_16_bits_are_read_exactly_and_written_to_the_nearest():
    case = Case(4, 2, dtype=torch.float16)
    row = in_order(Text(case, 400), 290, 3, 20)
    wide = replace(row, k=row.k.float(), v=row.v.float())
    assert torch.equal(attend(case, [row])[0], attend(replace(case, dtype=torch.float32), [wide])[0])
    for dtype in (torch.bfloat16, torch.float16):
        case = replace(case, dtype=dtype)
        row = in_order(Text(case, 400), 290, 3, 20)
        assert torch.equal(attend(case, [row], torch.bfloat16)[0], attend(case, [row])[0].bfloat16())


def test_bfloat16_is_rounded_as_in_a_fused_kernel_of_torch():
    case = Case(9, 3, dtype=torch.bfloat16, scale=0.125)
    text = Text(case, 700)
    row = in_order(text, 300, 400)
    exact = by_definition(replace(case, dtype=torch.float32), row)
    own = scaled_dot_product_attention(
        *(t[None] for t in (row.q.transpose(0, 1).bfloat16(), row.k, row.v)),
        attn_mask=torch.ones(400, 700, dtype=torch.bool).tril(300), scale=case.scale, enable_gqa=True,
    )  # fmt: skip
    found = attend(case, [row], torch.bfloat16)[0].double()
    assert (found - exact).norm() < 1.02 * (own[0].transpose(0, 1).double() - exact).norm()


@pytest.mark.parametrize("size", [0.0, 1e-30, 30.0, 3000.0])
def test_extreme_scores(size):
    case = Case(scale=1.0)
    text, wrong = Text(case, 700), Text(case, 100, 1)
    text.q *= size
    text.k[:, 100:300] *= 0.01
    row = in_order(text, 0, 700)
    whole, exact = attend(case, [row])[0], by_definition(case, row)
    own = scaled_dot_product_attention(
        *(t[None] for t in (row.q.transpose(0, 1), row.k, row.v)), is_causal=True, scale=1.0
    )
    assert error(whole, exact) < 2 * error(own[0].transpose(0, 1), exact) + 1e-6
    fed, right = bushy(text, wrong, 600, 1, 40)
    assert torch.equal(attend(case, [fed])[0][right], whole[600:641])


def test_what_is_not_a_number_stays_visible():
    text = Text(Case(), 300)
    text.q[290, 1, 3] = torch.nan
    found = attend(Case(), [in_order(text, 280, 20)])[0]
    assert found[10, 1].isnan().all() and found.isnan().sum() == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_exactly(dtype):
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 512, 1, 128)
    zeros = torch.zeros_like(v)
    out = attend_in_order(zeros, [(zeros, v)], [chain(0, 1)], AttentionSpec(0.3))
    if dtype == torch.bfloat16 and multiplies_pairs():
        v = torch.where(v.abs() < torch.finfo(dtype).tiny, torch.zeros_like(v), v)  # there denormals count as 0
    assert torch.equal(out.isnan(), v.isnan())
    assert torch.equal(out.nan_to_num(0, 1e4, -1e4), v.nan_to_num(0, 1e4, -1e4))


def test_several_threads_may_call_at_once():
    torch.set_num_threads(2)
    cases = [torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)) for n in range(1, 9)]
    rows = tuple(torch.randn(1, 2, 900, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))

    def attended(q: torch.Tensor) -> torch.Tensor:
        return attend_in_order(q, [rows], [chain(900 - q.shape[2], q.shape[2])], AttentionSpec(0.3))

    expected = [attended(q) for q in cases]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(callers.map(attended, cases), expected, strict=True))


def test_a_pool_that_is_busy_is_not_waited_for():
    busy, ran = threading.Event(), []
    for _ in range(2 * (os.cpu_count() or 1)):
        executor.pool().submit(busy.wait, 30)
    executor.run_in_pool(ran.append, 1, 3)
    busy.set()
    assert ran == [1]
