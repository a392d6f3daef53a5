"""Few queries over many keys: as exact as torch's kernel, and the same to the bit however it is called."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention import attention_tile
from forerun.kernels.attention.attention import (
    BACKENDS,
    AttentionSpec,
    AttentionState,
    attend,
    select_backend,
)
from forerun.kernels.runtime import thread_pool, vector_ir
from forerun.kv.full_cache import FullCache

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

SPEC = AttentionSpec(0.3)


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def qkv(n: int, m: int, dim: int = 64, heads: int = 2, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Keys and values as a cache gives them: the first rows of a larger buffer, some of them left out."""
    generator = torch.Generator().manual_seed(n * 1000 + m + dim)
    q = torch.randn(1, heads, n, dim, generator=generator) * size
    k, v = (torch.randn(1, heads, m + 40, dim, generator=generator)[:, :, 7 : 7 + m] for _ in range(2))
    return q, k, v


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
    return BACKENDS["math"](q.double(), k.double(), v.double(), SPEC, None)


def error(state: AttentionState, exact: AttentionState) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(state, exact, strict=True))


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 12, 16, 31])
def test_as_exact_as_the_kernel_of_torch(n: int, dim: int) -> None:
    errors: dict[str, list[float]] = {"few_queries": [], "flash_cpu": []}
    for m in (1, 31, 32, 33, 1024, 1025, 3000):
        q, k, v = qkv(n, m, dim)
        exact = by_definition(q, k, v)
        for name, found in errors.items():
            found.append(error(BACKENDS[name](q, k, v, SPEC, None), exact))
            assert found[-1] < 2e-5
    assert sum(errors["few_queries"]) < 1.5 * sum(errors["flash_cpu"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_16_bits_are_widened_and_summed_as_floats(n: int, dtype: torch.dtype) -> None:
    for m in (1, 33, 2100):
        q, k, v = (t.to(dtype) for t in qkv(n, m, 80))
        narrow, wide = (BACKENDS["few_queries"](*x, SPEC, None) for x in ((q, k, v), (q.float(), k.float(), v.float())))
        assert torch.equal(narrow.out, wide.out.to(dtype))
        assert torch.equal(narrow.lse, wide.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_exactly(dtype: torch.dtype) -> None:
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 512, 1, 128)
    out = BACKENDS["few_queries"](torch.zeros_like(v), torch.zeros_like(v), v, SPEC, None).out
    assert torch.equal(out.isnan(), v.isnan())
    assert torch.equal(out.nan_to_num(0, 1e4, -1e4), v.nan_to_num(0, 1e4, -1e4))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_grouped_heads_through_attend(group: int) -> None:
    q, k, v = qkv(3, 5000, heads=2)
    q = torch.randn(1, 2 * group, 3, 64)
    few = attend(q, k, v, SPEC)
    exact = by_definition(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    assert error(few, exact) < 1e-5


@pytest.mark.parametrize("size", [0.0, 1e-30, 30.0, 300.0])
def test_extreme_scores(size: float) -> None:
    q, k, v = qkv(5, 2100, size=size)
    exact = by_definition(q, k, v)
    few, flash = (BACKENDS[name](q, k, v, SPEC, None) for name in ("few_queries", "flash_cpu"))
    assert error(few, exact) < 2 * error(flash, exact) + 1e-6


def test_scores_that_fall_by_far_more_than_exp_can_tell() -> None:
    q, k, v = qkv(2, 3000)
    q[:] = 1
    k[:] = -torch.linspace(0, 50, 3000)[:, None]
    for keys, values in ((k, v), (k.flip(2), v.flip(2))):
        few = BACKENDS["few_queries"](q, keys, values, SPEC, None)
        assert error(few, by_definition(q, keys, values)) < 1e-4


def test_what_is_not_a_number_stays_visible() -> None:
    q, k, v = qkv(5, 1200)
    q[0, 0, 1, 3] = torch.nan
    out, lse = BACKENDS["few_queries"](q, k, v, SPEC, None)
    assert out[0, 0, 1].isnan().all() and lse[0, 0, 1].isnan()
    assert not out[0, 0, 0].isnan().any() and not out[0, 1].isnan().any()
    k[0, 1, 700, 5] = torch.inf
    assert BACKENDS["few_queries"](q, k, v, SPEC, None).out[0, 1].isnan().any()


def test_the_number_of_threads_changes_nothing() -> None:
    q, k, v = qkv(6, 5000)
    states = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        states.append(BACKENDS["few_queries"](q, k, v, SPEC, None))
    assert all(torch.equal(a, b) for state in states for a, b in zip(state, states[0], strict=True))


@pytest.mark.parametrize("dim", [64, 80])
def test_a_query_gets_the_same_alone_and_among_others(dim: int) -> None:
    q, k, v = qkv(23, 2050, dim)
    together = BACKENDS["few_queries"](q, k, v, SPEC, None)
    for i in (slice(0, 1), slice(5, 7), slice(22, 23), slice(3, 15)):
        alone = BACKENDS["few_queries"](q[:, :, i], k, v, SPEC, None)
        assert torch.equal(alone.out, together.out[:, :, i])
        assert torch.equal(alone.lse, together.lse[:, :, i])


def test_rows_may_lie_anywhere() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(4, 1500, heads=3))
    assert k.stride(2) == 3 * 64
    assert error(BACKENDS["few_queries"](q, k, v, SPEC, None), by_definition(q, k, v)) < 1e-5


def test_several_threads_may_call_at_once() -> None:
    torch.set_num_threads(2)
    work = [qkv(n, 4000) for n in range(1, 9)]
    expected = [BACKENDS["few_queries"](*tensors, SPEC, None).out for tensors in work]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(5):
            outs = callers.map(lambda tensors: BACKENDS["few_queries"](*tensors, SPEC, None).out, work)
            assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_without_openmp_a_pool_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(6, 5000)
    expected = BACKENDS["few_queries"](q, k, v, SPEC, None)
    torch.set_num_threads(3)
    monkeypatch.setattr(thread_pool, "openmp", lambda: None)
    for _ in range(20):
        state = BACKENDS["few_queries"](q, k, v, SPEC, None)
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))


def test_a_pool_that_is_busy_is_not_waited_for() -> None:
    busy, ran = threading.Event(), []
    for _ in range(2 * (os.cpu_count() or 1)):
        thread_pool.pool().submit(busy.wait, 30)
    thread_pool.run_in_pool(ran.append, 1, 3)
    busy.set()
    assert ran == [1]


def test_a_cache_with_a_long_text_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    kernel = BACKENDS["few_queries"]
    monkeypatch.setitem(BACKENDS, "few_queries", lambda *arguments: used.append(1) or kernel(*arguments))
    q, k, v = qkv(904, 904, heads=10)
    cache, first, then = (
        FullCache(),
        Block(np.arange(900), DraftTree.empty(), 0),
        Block(np.arange(4), DraftTree.empty(), 900),
    )
    cache.attend(0, *(t[:, :, :900] for t in (q, k, v)), first, SPEC)
    cache.commit(first, [])
    out = cache.attend(0, *(t[:, :, 900:] for t in (q, k, v)), then, SPEC)
    seen = torch.ones(904, 904).tril()[900:] > 0
    bias = torch.zeros(4, 904).double().masked_fill(~seen, -torch.inf)
    exact = BACKENDS["math"](*(t.double() for t in (q[:, :, 900:], k, v)), SPEC, bias).out
    assert used == [1]
    assert (out.double() - exact).abs().max() < 1e-5


def test_chosen_where_it_can_compute_and_pays() -> None:
    def choice(n: int = 4, m: int = 4096, dim: int = 64, dtype: torch.dtype = torch.float32, **kind: float) -> str:
        q, k, v = (torch.empty(1, 8, rows, dim, dtype=dtype) for rows in (n, m, m))
        return select_backend(q, k, v, AttentionSpec(0.3, **kind), None)  # type: ignore[arg-type]

    assert choice() == choice(n=256) == choice(n=32, m=32768, dtype=torch.bfloat16) == "few_queries"
    assert choice(dtype=torch.float16) == choice(n=8, m=4096, dtype=torch.bfloat16) == "few_queries"
    assert choice(n=12, dtype=torch.float16) == choice(n=64, m=32768, dtype=torch.bfloat16) == "flash_cpu"
    assert choice(n=1, m=32768, dtype=torch.float16) == choice(n=4, m=2048, dtype=torch.bfloat16) == "flash_cpu"
    assert choice(n=1000) == choice(m=64) == choice(dim=24) == choice(dtype=torch.float64) == "flash_cpu"
    assert choice(softcap=2.0) == "math"
    q, k, v = qkv(4, 4096, heads=4)
    assert select_backend(q, k, v, SPEC, None) == "few_queries"
    assert select_backend(q, k, v, SPEC, torch.zeros(4, 4096)) == "flash_cpu"
    assert select_backend(q.requires_grad_(), k, v, SPEC, None) == "flash_cpu"


@pytest.mark.skipif(
    attention_tile.TILES_AT_ONCE != 1, reason="the vectors here are wide; test_narrow runs it without them"
)
def test_tiles_for_narrow_vectors_give_the_same_attention() -> None:
    for n, m, dim in itertools.product((1, 6), (33, 1100), (16, 80)):
        q, k, v = qkv(n, m, dim)
        assert error(BACKENDS["few_queries"](q, k, v, SPEC, None), by_definition(q, k, v)) < 1e-5
