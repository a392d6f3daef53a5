"""Backends agree with the definition, merging is exact, and windows hide what they must."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import BACKENDS, AttentionSpec, AttentionState, attend, merge
from forerun.kv.full_cache import FullCache

SPEC = AttentionSpec(0.3)


def qkv(n: int, m: int, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + m)
    shapes = ((heads, n), (kv_heads, m), (kv_heads, m))
    return [torch.randn(1, h, t, 16, generator=generator, dtype=torch.float64).to(dtype) for h, t in shapes]


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Softmax over the keys marked in ``seen`` ``[n, m]``, heads repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_with_the_definition(backend, masked, dtype):
    if backend == "efficient" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = "cuda" if backend == "efficient" else "cpu"
    for n, m in ((1, 1), (3, 3), (5, 200), (40, 70)):
        q, k, v = (t.to(device) for t in qkv(n, m, dtype=dtype))
        seen = torch.rand(n, m, generator=torch.Generator().manual_seed(n)) < 0.5 if masked else torch.ones(n, m) > 0
        seen[:, 0] = True
        bias = torch.zeros(n, m, dtype=dtype).masked_fill(~seen, -torch.inf).to(device) if masked else None
        out, lse = BACKENDS[backend](q, k, v, SPEC, bias)
        expected = by_definition(*(t.double().cpu() for t in (q, k, v)), seen, SPEC)
        limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        assert (out.double().cpu() - expected).abs().max() < limit
        scores = (q.double() @ k.double().transpose(-1, -2)).cpu() * SPEC.scaling
        assert (lse.double().cpu() - scores.masked_fill(~seen, -torch.inf).logsumexp(-1)).abs().max() < limit


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_heads_read_their_own_keys(kv_heads):
    q, k, v = qkv(5, 5, 4, kv_heads)
    seen = torch.ones(5, 5).tril() > 0
    bias = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    assert (attend(q, k, v, SPEC, bias).out - by_definition(q, k, v, seen, SPEC)).abs().max() < 1e-12


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40))
def test_merging_two_parts_equals_one_softmax(n, left, right):
    q, k, v = qkv(n, left + right)
    a = attend(q, k[:, :, :left], v[:, :, :left], SPEC)
    b = attend(q, k[:, :, left:], v[:, :, left:], SPEC)
    whole = attend(q, k, v, SPEC)
    assert (merge(a, b) - whole.out).abs().max() < 1e-12


@pytest.mark.parametrize("first", [1e4, -1e4])
def test_merging_survives_extreme_scores(first):
    out = torch.ones(1, 1, 1, 2)
    parts = AttentionState(out, torch.full((1, 1, 1), first)), AttentionState(out * 2, torch.full((1, 1, 1), -first))
    assert torch.equal(merge(*parts), out if first > 0 else out * 2)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return DraftTree(np.arange(n), np.array(parents, np.int64))


@given(
    trees(), st.integers(0, 20), st.integers(1, 9), st.sampled_from([None, 1, 2, 4, 9, 50]),
    st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_full_cache_attends_to_prefix_and_ancestors_within_the_window(tree, prefix, pending, window, softcap):
    spec = AttentionSpec(0.3, window, softcap)
    cache = FullCache()
    _, all_k, all_v = qkv(1, prefix + pending + len(tree), 4, 2)
    if prefix:
        q, _, _ = qkv(prefix, 1)
        first = Block(np.arange(prefix), DraftTree.empty(), 0)
        cache.attend(0, q, all_k[:, :, :prefix], all_v[:, :, :prefix], first, spec)
        cache.commit(first, [])
    block = Block(np.arange(pending), tree, prefix)
    q, _, _ = qkv(len(block), 1)
    out = cache.attend(0, q, all_k[:, :, prefix:], all_v[:, :, prefix:], block, spec)
    positions = np.concatenate((np.arange(prefix), block.positions))
    seen = np.concatenate((np.ones((len(block), prefix), bool), block.visible), 1)
    if window is not None:
        seen &= positions[None] > block.positions[:, None] - window
    assert (out - by_definition(q, all_k, all_v, torch.from_numpy(seen), spec)).abs().max() < 1e-12


@given(trees(), st.integers(0, 2**20))
def test_commit_keeps_exactly_the_accepted_path(tree, choice):
    path = tree.ancestors[choice % len(tree)].nonzero()[0].tolist() if len(tree) else []
    cache = FullCache()
    block = Block(np.arange(2), tree, 0)
    q, k, v = qkv(len(block), len(block))
    cache.attend(0, q, k, v, block, SPEC)
    cache.commit(block, path)
    assert cache.length == 2 + len(path)
    kept = [0, 1, *(2 + node for node in path)]
    keys, values = cache._layers[0]
    assert torch.equal(keys[:, :, : cache.length], k[:, :, kept])
    assert torch.equal(values[:, :, : cache.length], v[:, :, kept])


def test_cache_grows_without_losing_what_it_holds_and_truncates():
    cache = FullCache(capacity=4)
    _, k, v = qkv(1, 9000)
    for start in range(0, 9000, 450):
        block = Block(np.arange(450), DraftTree.empty(), start)
        rows = slice(start, start + 450)
        cache.append(0, k[:, :, rows], v[:, :, rows])
        cache.commit(block, [])
    assert torch.equal(cache._layers[0][0][:, :, :9000], k)
    assert cache.nbytes <= 1.05 * (k.nbytes + v.nbytes)
    cache.truncate(7)
    assert cache.length == 7
    with pytest.raises(ValueError, match="between 0 and 7"):
        cache.truncate(8)
