"""Attention for GPUs, in Triton's interpreter: right, and with the same bits whatever shares the pass."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from support.triton_products import interpret_products, interpret_quickly

from forerun import kernels
from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree
from forerun.kernels.attention.attention import AttentionSpec, AttentionState, _math, attend_in_order, merge
from forerun.kernels.gpu import attend as gpu
from forerun.kernels.gpu import pass_tables
from forerun.kernels.gpu.pass_tables import PassDescription, PassTables, TableSizes, share_programs, splits_of

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_products(monkeypatch)
    interpret_quickly(monkeypatch)


CPU = torch.device("cpu")
TREE = DraftTree(np.arange(6), np.array([ROOT, ROOT, 0, 1, 3, 3]))
SPEC = AttentionSpec(scaling=0.3)
PATH = [1, 3, 5]
"""Nodes of a branch of ``TREE``."""


class Memory:
    """One row's keys and values of one layer, as a full cache holds them: ``[2, Hkv, room, d]``."""

    def __init__(self, text: torch.Tensor, held: int, room: int) -> None:
        self.held = held
        self.store = torch.full((2, text.shape[1], room, text.shape[3]), torch.nan, dtype=text.dtype)
        self.store[:, :, :held] = text[:, :, :held]

    def places(self) -> tuple[list[int], list[int]]:
        keys, values = self.store
        return [keys.data_ptr(), values.data_ptr()], [*keys.stride()[:2], *values.stride()[:2]]


Given = tuple[Memory, Block, torch.Tensor, torch.Tensor]
"""A row's memory, block, queries ``[1, H, n, d]``, and new keys and values ``[2, Hkv, n, d]``."""


def token(text: torch.Tensor, q: torch.Tensor, at: int) -> Given:
    """A row of one token, at a place of its text."""
    block = Block(np.zeros(1, np.int64), DraftTree.empty(), at)
    return Memory(text, at, at + 1), block, q, text[:, :, at : at + 1]


def run(rows: Sequence[Given], spec: AttentionSpec = SPEC, programs: int = 64) -> list[torch.Tensor]:
    """Each row's output ``[1, H, n, d]``; ``programs`` are those of a KV head's scan."""
    found = [memory.places() for memory, *_ in rows]
    blocks = [block for _, block, _, _ in rows]
    addresses, strides = np.array([[place for place, _ in found]]), np.array([[each for _, each in found]])
    batch = PassDescription(blocks, addresses, strides, rows[0][2].shape[1] // rows[0][3].shape[1], programs)
    places = PassTables.of(batch, CPU)
    q = torch.cat([each for _, _, each, _ in rows], 2)
    new = torch.cat([each for *_, each in rows], 2)
    gpu.store(0, new[0][None], new[1][None], places)
    out = gpu.attend(0, q, new.shape[1], places, spec, new.shape[3])
    return list(torch.split(out, [len(block) for _, block, _, _ in rows], 2))


def reference(q: torch.Tensor, kv: torch.Tensor, position: int, spec: AttentionSpec) -> torch.Tensor:
    """One query's output over a text's keys up to its position, in float64."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    keys, values = kv[:, None, :, first : position + 1].double()
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return merge(AttentionState(*_math(q.double(), keys, values, spec, None)), sinks=spec.sinks)


SPECS = {
    "plain": {}, "window": {"window": 40}, "softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.linspace(-1, 3, 6)},
}  # fmt: skip


CELLS = [
    (held, dtype, kind)
    for held in (3, 530)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for kind in SPECS
    if held == 3 or dtype == torch.float32 or kind == "plain"
]


ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize(("held", "dtype", "kind"), CELLS)
def test_right_and_the_same_bits(held, dtype, kind, merging, monkeypatch):
    """A branch has the bits of the text alone: token by token, as a chain, in a tree, and beside another row. So it has
    where one program does all splits of a tile (``merging``), while each split had its own for the text alone."""
    generator = torch.Generator().manual_seed(held)
    spec = AttentionSpec(scaling=0.3, **SPECS[kind])
    length = held + 1 + len(PATH)
    text = torch.randn(2, 2, length, 24, generator=generator).to(dtype)
    queries = torch.randn(1, 6, length, 24, generator=generator).to(dtype)
    here = range(held, length)
    right = torch.cat([run([token(text, queries[:, :, at : at + 1], at)], spec)[0] for at in here], 2)
    for i, at in enumerate(here):
        wanted = reference(queries[:, :, at : at + 1], text, at, spec)
        torch.testing.assert_close(right[:, :, i : i + 1].double(), wanted, atol=ERRORS[dtype], rtol=0)

    programs = 1 if merging else 64
    chain = Block(np.zeros(1, np.int64), DraftTree.chain(np.arange(len(PATH))), held)
    (found,) = run([(Memory(text, held, length), chain, queries[:, :, held:], text[:, :, held:])], spec, programs)
    assert torch.equal(found, right)

    tree = Block(np.zeros(1, np.int64), TREE, held)
    q, new = (torch.randn(*t.shape[:2], 7, 24, generator=generator).to(dtype) for t in (queries, text))
    own = [0, *(node + 1 for node in PATH)]
    q[:, :, own], new[:, :, own] = queries[:, :, held:], text[:, :, held:]
    other = torch.randn(2, 2, 70, 24, generator=generator).to(dtype)
    beside = (
        Memory(other, 61, 70), Block(np.zeros(4, np.int64), DraftTree.chain(np.arange(5)), 61),
        torch.randn(1, 6, 9, 24, generator=generator).to(dtype), other[:, :, 61:],
    )  # fmt: skip
    for rows in ([], [beside]):
        found = run([*rows, (Memory(text, held, held + 7), tree, q, new)], spec, programs)[-1]
        assert torch.equal(found[:, :, own], right)

    memory = Memory(text, held, held + 7)
    memory.store[:, :, held:] = new
    monkeypatch.setattr(kernels.gpu, "runs_on", lambda device: True)
    row_by_row = attend_in_order(q, [(memory.store[:1], memory.store[1:])], [tree], spec)
    assert torch.equal(row_by_row[:, :, own], right), "models without tables of addresses, such as hybrids"


def cut(monkeypatch: pytest.MonkeyPatch, short: int, shorts: int, long: int) -> None:
    """Cut texts into splits of other sizes."""
    sizes = {"GPU_SHORT_SPLIT_TOKENS": short, "GPU_SHORT_SPLITS": shorts, "GPU_SPLIT_TOKENS": long}
    for (name, size), kernels_name in zip(sizes.items(), ("SHORT_SPLIT", "SHORT_SPLITS", "LONG_SPLIT"), strict=True):
        monkeypatch.setattr(pass_tables, name, size)
        monkeypatch.setattr(gpu, kernels_name, tl.constexpr(size))


def test_another_order_has_other_bits(monkeypatch):
    """Blocks of another size sum in another order: the comparisons above can fail."""
    generator = torch.Generator().manual_seed(0)
    text, q = torch.randn(2, 2, 300, 32, generator=generator), torch.randn(1, 2, 1, 32, generator=generator)
    (before,) = run([token(text, q, 299)])
    cut(monkeypatch, 64, 16, 1024)
    assert not torch.equal(run([token(text, q, 299)])[0], before)


def test_splits_of_a_long_text(monkeypatch):
    """Short splits, then long ones: right, and with the same bits from any number of programs and from one that
    merges."""
    cut(monkeypatch, 64, 2, 128)
    assert [splits_of(length) for length in (0, 1, 64, 65, 128, 129, 256, 257)] == [0, 1, 1, 2, 2, 3, 3, 4]
    generator = torch.Generator().manual_seed(1)
    text, q = torch.randn(2, 1, 900, 16, generator=generator), torch.randn(1, 2, 1, 16, generator=generator)
    found = []
    for programs, loaded in ((1024, 4), (3, 1), (1, 1)):  # one a split, three for all, and one that merges
        monkeypatch.setattr(gpu, "GPU_COMBINE_SPLITS", loaded)
        found += run([token(text, q, 899)], SPEC, programs)
    torch.testing.assert_close(found[0].double(), reference(q, text, 899, SPEC), atol=1e-5, rtol=0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("heads", [1, 3, 8, 20])
def test_groups_of_any_size(heads):
    """Queries of a group are merged side by side, each as often as a tensor core's tile has room for it; groups of more
    than 16 go to two programs."""
    generator = torch.Generator().manual_seed(heads)
    text, q = torch.randn(2, 1, 300, 16, generator=generator), torch.randn(1, heads, 2, 16, generator=generator)
    chain = Block(np.zeros(1, np.int64), DraftTree.chain(np.arange(1)), 298)
    (found,) = run([(Memory(text, 298, 300), chain, q, text[:, :, 298:])])
    wanted = torch.cat([reference(q[:, :, i : i + 1], text, 298 + i, SPEC) for i in range(2)], 2)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    assert torch.equal(run([token(text, q[:, :, :1], 298)], SPEC, 1)[0], found[:, :, :1])


@pytest.mark.parametrize("count", [16, 64])
def test_one_long_row_among_many_short_ones(count):
    """The bits of each row alone, in a batch of 16 and of 64 rows, of which one has most of the splits."""
    generator, rows = torch.Generator().manual_seed(count), []
    for row in range(count):
        length = 530 if row == count // 2 else 3 + row % 5
        text = torch.randn(2, 1, length + 1, 16, generator=generator)
        rows.append(token(text, torch.randn(1, 2, 1, 16, generator=generator), length))
    together = run(rows, SPEC, 2 * count + 8)
    for i in (0, count // 2, count - 1):
        assert torch.equal(run(rows[i : i + 1])[0], together[i]), i


@pytest.mark.parametrize("programs", [1, 7, 33, 132, 1056])
@pytest.mark.parametrize("splits", [[1], [132], [0, 2, 0], [1] * 15 + [132], [20] * 40, [3, 3, 64, 64]])
def test_each_split_is_some_program_s_job(programs, splits):
    size = TableSizes(1, 1, 1, len(splits), 16, 0, 1, max(splits), programs)
    room = np.zeros((size.jobs, 3), np.int64)
    jobs = room[: share_programs(np.ones(len(splits), np.int64), np.array(splits), size.merging, room)]
    done = [(tile, split) for tile, part, parts in jobs.tolist() for split in range(part, splits[tile], parts)]
    assert sorted(done) == [(tile, split) for tile, count in enumerate(splits) for split in range(count)]
    if not size.merging and sum(splits) > programs > 4 * len(splits):
        longest = max(len(range(part, splits[tile], parts)) for tile, part, parts in jobs.tolist())
        assert longest <= 2 * -(-sum(splits) // programs) + 1


def test_one_row_s_tiles_are_those_that_it_needs():
    """A pass of 5 to 16 tokens of one row with four query heads a KV head: no program has an empty tile."""
    for tokens in range(5, 17):
        rounded = 1 << (tokens - 1).bit_length()
        size = TableSizes(1, 1, tokens, -(-tokens * 4 // 32), 32, 0, 1, 132, 132).rounded(4)
        assert size.tiles == -(-rounded * 4 // 32) and size.jobs == 132


def test_numbers_of_a_head_must_be_contiguous():
    q = torch.randn(1, 2, 16, 4).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.attend(0, q, 1, None, AttentionSpec(1.0))
