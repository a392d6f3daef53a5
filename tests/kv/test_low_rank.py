"""The low-rank cache: what its queries choose, against the definition, and that it finds what a head looks for."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention import topk_attention, topk_rank
from forerun.kernels.attention.attention import AttentionSpec, attend
from forerun.kernels.runtime import vector_ir
from forerun.kernels.runtime.vector_ir import fused
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import CHUNK_KEYS, LowRankCache, LowRankConfig, ShortKeys

SPEC = AttentionSpec(scaling=0.25)
DIM = 16


def text(length: int, heads: int = 2, kv_heads: int = 2, seed: int = 0, dim: int = DIM) -> FullCache:
    """A full cache of two layers with random keys and values, read in two passes."""
    generator = torch.Generator().manual_seed(seed)
    full = FullCache()
    for count in (length - 1, 1):
        block = Block(np.zeros(count, np.int64), DraftTree.empty(), full.length)
        for layer in range(2):
            q, k, v = (torch.randn(1, h, count, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
            full.attend(layer, q, k, v, block, SPEC)
        full.commit(block, [])
    return full


def scanned(index: torch.Tensor, count: int, q: torch.Tensor) -> torch.Tensor:
    """The worth of the chunks of an index to queries that are not projected."""
    kv_heads, rank = index.shape[0], q.shape[2]
    same = torch.eye(rank).repeat(kv_heads, 1, 1)
    keys = ShortKeys(same, same, torch.zeros(kv_heads, 1, rank), len(q) // kv_heads)
    keys._short, keys._indexed = index, count
    return keys.worth(q)


@given(
    count=st.integers(1, 90) | st.just(600), kv_heads=st.integers(1, 3), group=st.integers(1, 3), n=st.integers(1, 9),
    quads=st.integers(1, 5), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_scan_is_its_definition(count, kv_heads, group, n, quads, seed):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-count // topk_rank.GROUP_CHUNKS) + 1
    shape = (kv_heads, groups, CHUNK_KEYS, quads, topk_rank.GROUP_CHUNKS, topk_rank.QUAD_NUMBERS)
    index = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    q = torch.randn(kv_heads * group, n, quads * topk_rank.QUAD_NUMBERS, generator=generator)
    q[0, 0] = 0
    found, expected = scanned(index, count, q), topk_rank.by_definition(index, count, q)
    assert found.shape == (kv_heads * group, n, count)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    if fused():  # a query is scored alike alone and among others
        assert all(torch.equal(scanned(index, count, q[:, i : i + 1]), found[:, i : i + 1]) for i in range(n))


def tied(cache: LowRankCache, layer: int, q: torch.Tensor) -> bool:
    """Whether some query finds the last chunk that it takes worth as much as one that it leaves: either is right."""
    if not cache.choosing(layer):
        return False
    worth = cache.worth(layer, q)
    worth[..., 0] = -torch.inf
    best = worth.topk(cache.slots(layer) + 1, -1).values
    return bool((best[..., -2] == best[..., -1]).any())


@given(
    length=st.integers(20, 900), budget=st.sampled_from([96, 2000]), kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 5]),
    branches=st.sampled_from([[], [[1, 2, 3]], [[1, 2, 3], [1, 4], [5]]]),
    softcap=st.sampled_from([None, 2.0]), sinks=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_by_kernels_is_that_by_torch_in_double_precision(
    length, budget, kv_heads, group, branches, softcap, sinks, dtype, seed
):
    if dtype == torch.bfloat16:  # rounding decides between keys of nearly the same score, so all are read
        budget = 2000
    heads, generator = kv_heads * group, torch.Generator().manual_seed(seed)
    spec = AttentionSpec(SPEC.scaling, softcap=softcap, sinks=torch.linspace(-1, 2, heads) if sinks else None)
    read, fulls = text(length, heads, kv_heads, seed, 32), (FullCache(), FullCache())
    for full, kind in zip(fulls, (dtype, torch.float64), strict=True):
        full.extend({layer: tuple(t.to(dtype).to(kind) for t in read.read(layer, 0, length)) for layer in range(2)})
        full.specs, full.sample = read.specs, read.sample
    caches = [LowRankCache(full, LowRankConfig(budget, 16, 8)) for full in fulls]
    for cache in caches:
        cache.sync()
    caches[1]._indexes = caches[0]._indexes  # rounding may decide what is chosen
    block = Block(np.zeros(1, np.int64), DraftTree.from_branches(branches, 9), length)
    qkv = [torch.randn(1, h, len(block), 32, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]
    assume(not tied(caches[0], 1, qkv[0]))
    found, exact = caches[0].attend(1, *qkv, block, spec), caches[1].attend(1, *(t.double() for t in qkv), block, spec)
    assert torch.allclose(found.double(), exact, atol=2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("group", [1, 2])
def test_a_query_finds_the_one_key_that_it_looks_for(group):
    """Wherever it is, though the chunk's other keys point elsewhere; an index of chunk means would not show it."""
    full = text(4000, heads=2 * group)
    cache = LowRankCache(full, LowRankConfig(budget=256, window=16, rank=DIM))
    keys, values = full.read(0, 0, 4000)
    places = (100, 1234, 3900)
    for place in places:
        keys[0, :, place] *= 8 / keys[0, :, place].norm(dim=-1, keepdim=True)
        values[0, :, place] = 0
        values[0, :, place, 0] = place
    cache.sync()
    for place in places:
        q = 12 * keys[:, :, place : place + 1].repeat_interleave(group, 1)
        k, v = torch.zeros(1, 2, 1, DIM), torch.zeros(1, 2, 1, DIM)
        out = cache.attend(0, q, k, v, Block(np.zeros(1, np.int64), DraftTree.empty(), 4000), SPEC)
        assert (out[0, :, 0, 0] > 0.99 * place).all()


def test_the_index_follows_a_growing_text():
    """As if it had been made of the longer text at once, with the same dimensions."""
    full = text(900)
    cache = LowRankCache(full, LowRankConfig(budget=200, window=16))
    cache.sync()
    generator = torch.Generator().manual_seed(5)
    for count in (1, 3, 40, 700, 16):
        block = Block(np.zeros(count, np.int64), DraftTree.empty(), full.length)
        for layer in range(2):
            full.attend(layer, *(torch.randn(1, 2, count, DIM, generator=generator) for _ in "qkv"), block, SPEC)
        full.commit(block, [])
        cache.sync()
        index = cache._indexes[1]
        short, known = index._short.clone(), index._indexed
        index._indexed = 0
        index.extend(lambda first, last: full.read(1, first, last)[0][0], known * CHUNK_KEYS)
        groups = -(-known // topk_rank.GROUP_CHUNKS)
        assert known == (full.length - 16) // CHUNK_KEYS
        assert torch.equal(index._short[:, :groups], short[:, :groups])


def test_what_a_query_sees_does_not_depend_on_what_stands_beside_it():
    full = text(3000)
    cache = LowRankCache(full, LowRankConfig(budget=512))
    cache.sync()
    pending = np.zeros(1, np.int64)
    block = Block(pending, DraftTree.from_branches([[1, 2, 3], [4, 5]], 5), 3000)
    q, k, v = (torch.randn(1, 2, len(block), DIM, generator=torch.Generator().manual_seed(7)) for _ in "qkv")
    together = cache.attend(0, q, k, v, block, SPEC)
    first = Block(pending, DraftTree.empty(), 3000)
    alone = cache.attend(0, *(t[:, :, :1] for t in (q, k, v)), first, SPEC)
    assert torch.allclose(together[:, :, :1], alone, atol=1e-6)


@pytest.mark.parametrize(("budget", "length", "group", "slots"), [
    (4096, 5000, 1, 64), (4096, 120_000, 1, 125), (4096, 300_000, 1, 256), (16, 9000, 1, 1), (1, 9, 1, 1),
    (512, 7500, 1, 8), (512, 7500, 3, 24), (512, 7500, 8, 32), (512, 12000, 3, 32), (512, 900, 3, 24),
])  # fmt: skip
def test_queries_see_more_of_a_longer_text_and_what_their_group_brings_up_to_the_budget(budget, length, group, slots):
    assert LowRankConfig(budget).slots(length, group) == slots


def test_short_keys_cost_a_twenty_first_of_the_full_cache():
    length = 20000
    full = text(300, dim=64)
    full.extend({layer: tuple(torch.randn(1, 2, length - 300, 64) for _ in "kv") for layer in range(2)})
    cache = LowRankCache(full, LowRankConfig())
    cache.sync()
    assert sum(index.nbytes for index in cache._indexes.values()) < 1.25 * length * 2 * 2 * (64 * 2 * 4) * 24 / 512


@pytest.mark.parametrize("n", [1, 3])
def test_the_queries_of_a_group_choose_together(n):
    """The output is that of attention over the chunks that are nearest to being some query's best."""
    full = text(2000, heads=6)
    cache = LowRankCache(full, LowRankConfig(budget=128, window=16, rank=DIM))
    cache.sync()
    q, k, v = (torch.randn(1, h, n, DIM, generator=torch.Generator().manual_seed(2)) for h in (6, 2, 2))
    block = Block(np.zeros(1, np.int64), DraftTree.from_branches([[1, 2]], 2) if n > 1 else DraftTree.empty(), 2000)
    out = cache.attend(0, q, k, v, block, SPEC)
    alone = cache._indexes[0].worth(q[0])
    keys, values = full.read(0, 0, 2000)
    tail, slots = 2000 - cache.near, cache.slots(0)
    assert slots == 6  # of three queries, a fourth of eight chunks each
    for head in range(2):
        worth = alone[3 * head : 3 * head + 3, 0]
        beside = (worth - worth[:, 1:].amax(1, keepdim=True)).amax(0)
        beside[0] = torch.inf
        best = beside.topk(slots + 1).indices
        chunks = best[beside[best] * SPEC.scaling >= -topk_attention.MARGIN_NATS]
        rows = torch.cat([*(torch.arange(CHUNK_KEYS) + int(c) * CHUNK_KEYS for c in chunks), torch.arange(tail, 2000)])
        mine = slice(head, head + 1), slice(3 * head, 3 * head + 3)
        seen = [torch.cat((t[:, mine[0], rows], new[:, mine[0], :1]), 2) for t, new in ((keys, k), (values, v))]
        assert torch.allclose(out[:, mine[1], :1], attend(q[:, mine[1], :1], *seen, SPEC).out, atol=2e-5)


def test_settings_are_checked():
    for name in ("budget", "window", "rank"):
        with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
            LowRankConfig(**{name: 0})
    with pytest.raises(ValueError, match=r"^rank is 6; it must be a multiple of 4$"):
        LowRankConfig(rank=6)


WITHOUT_DOTS = """
import torch
from forerun.kernels.attention import topk_rank
from kv.test_low_rank import scanned

assert not topk_rank.DOTS
generator = torch.Generator().manual_seed(3)
index = torch.randint(0, 256, (2, 9, 16, 4, 16, 4), dtype=torch.uint8, generator=generator)
for n in (1, 3, 6):
    q = torch.randn(4, n, 16, generator=generator)
    assert torch.allclose(scanned(index, 140, q), topk_rank.by_definition(index, 140, q), rtol=1e-5, atol=1e-4)
"""


@pytest.mark.matrix
@pytest.mark.skipif(not topk_rank.DOTS, reason="the processor has no such instruction anyway")
def test_processors_that_do_not_multiply_bytes_find_the_same():
    features = vector_ir.features().replace("+avx512vnni", "-avx512vnni")
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    subprocess.run([sys.executable, "-c", WITHOUT_DOTS], env=environment, check=True, timeout=300)
