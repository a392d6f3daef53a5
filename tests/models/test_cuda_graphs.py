"""Recordings of passes and their tables: sizes are few whatever texts are like, and tables begin where Triton wants."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from forerun.core import work_clock
from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree
from forerun.kernels.gpu.pass_tables import TABLE_ALIGNMENT, PassDescription, PassTables
from forerun.models.forward import cuda_graphs
from forerun.models.forward.cuda_graphs import GraphCache

CPU = torch.device("cpu")
SPARE = torch.zeros(2, TABLE_ALIGNMENT)
LENGTHS = sorted({*range(1, 40), *(np.geomspace(40, 200_000, 40).astype(int).tolist())})
COUNTS = (*range(1, 20), 31, 32, 33, 47, 64)


def described(lengths: list[int], counts: list[int], group: int, branches: bool = False) -> PassDescription:
    """A pass of rows of these lengths, each with a chain of so many tokens, or with as many branches of one."""
    blocks = []
    for length, count in zip(lengths, counts, strict=True):
        drafts = np.arange(count - 1)
        tree = DraftTree(drafts, np.full(count - 1, ROOT)) if branches else DraftTree.chain(drafts)
        blocks.append(Block(np.zeros(1, np.int64), tree, length))
    rows = np.zeros((2, len(blocks), 2), np.int64), np.zeros((2, len(blocks), 4), np.int64)
    return PassDescription(blocks, *rows, group, 132)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is recorded, and what runs at once."""
    done: list[str] = []

    class Counted:
        def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            done.append("recorded")
            return lambda: done.append("replayed"), None

    monkeypatch.setattr(cuda_graphs, "Recorder", Counted)
    return done


def graphs(done: list[str]) -> GraphCache[None]:
    return GraphCache(lambda places: done.append("at once"), SPARE, CPU, cuda_graphs.Recorder())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_one_row_has_few_recordings_over_all_lengths(recorded, group):
    """Chains and trees of 1 to 64 tokens, at 79 lengths up to 200,000 tokens: seven sizes at each of three lengths.
    When one of each was there, nothing is recorded. Nothing runs at once."""
    cache = graphs(recorded)
    for length in (5, 4097, 60_000):
        for count in (1, 2, 4, 8, 16, 32, 64):
            cache.run(described([length], [count], group))
    assert len(cache.keys) == 7 * 3
    recorded.clear()
    for length in LENGTHS:
        for count in COUNTS:
            cache.run(described([length], [count], group, branches=count % 2 == 0))
    assert set(recorded) == {"replayed"} and len(recorded) == len(LENGTHS) * len(COUNTS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_recordings_of_many_rows_are_bounded(recorded, group, monkeypatch):
    """Rows, tokens and lengths at random; what is beyond the bound runs at once."""
    monkeypatch.setattr(cuda_graphs, "RECORDINGS_KEPT", 20)
    cache, random = graphs(recorded), np.random.default_rng(0)
    for _ in range(600):
        rows = int(random.integers(1, 33))
        counts = np.minimum(random.geometric(0.4, rows), 64 // rows).tolist()
        lengths = np.exp(random.uniform(0, 12, rows)).astype(int).tolist()
        cache.run(described(lengths, counts, group))
    assert len(cache.keys) == recorded.count("recorded") == 20
    assert "at once" in recorded[-100:]


def test_want_of_memory_ends_no_recordings(recorded, monkeypatch):
    """They are tried again; what has nothing to do with recordings is an error of the pass."""
    monkeypatch.setattr(cuda_graphs, "PASSES_UNTIL_RETRY", 3)
    monkeypatch.setattr(cuda_graphs, "synchronize", lambda device: None)
    cache, good = graphs(recorded), cuda_graphs.Recorder.record

    def failing(error: Exception) -> None:
        monkeypatch.setattr(cuda_graphs.Recorder, "record", Mock(side_effect=error))

    failing(torch.OutOfMemoryError("CUDA out of memory"))
    cache.run(described([5], [1], 4))
    monkeypatch.setattr(cuda_graphs.Recorder, "record", good)
    for _ in range(3):
        cache.run(described([5], [1], 4))
    assert recorded == ["at once"] * 3 + ["recorded", "replayed"]
    failing(RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        cache.run(described([5], [2], 4))
    failing(RuntimeError("operation not permitted when stream is capturing"))
    cache.run(described([5], [2], 4))
    monkeypatch.setattr(cuda_graphs.Recorder, "record", good)
    cache.run(described([5], [2], 4))
    assert recorded[5:] == ["at once"] * 2


def test_a_clock_of_prices_stands_while_a_pass_is_recorded(recorded, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(work_clock.time, "perf_counter", lambda: now[0])
    good = cuda_graphs.Recorder.record

    def record(self: Any, work: Any) -> Any:
        now[0] += 5.0
        return good(self, work)

    monkeypatch.setattr(cuda_graphs.Recorder, "record", record)
    began = work_clock.work_seconds()
    graphs(recorded).run(described([5], [1], 4))
    now[0] += 1.0
    assert work_clock.work_seconds() - began == 1.0


TABLES = ("ids", "positions", "wanted", "noise", "addresses", "strides", "tokens", "own", "rows", "tiles")


def test_all_tables_begin_at_multiples_of_16_bytes():
    """In passes of any size. Otherwise Triton would compile a kernel for the size anew."""
    pairs = itertools.product((1, 2, 3), (1, 4, 7))
    for counts in (*([n] for n in range(1, 66)), *map(list, pairs), [1] * 3, [1] * 5):
        batch = described([9] * len(counts), counts, 4, branches=True)
        for sizes in (batch.sizes, batch.sizes.rounded(4)):
            places = PassTables(sizes, CPU)
            places.fill(batch, SPARE if sizes.rows > len(counts) else None)
            assert places.own.shape[1] % 2 == 0
            for name in TABLES:
                table = getattr(places, name)
                layers = [*table] if name in ("addresses", "strides") else [table]
                assert all(layer.data_ptr() % TABLE_ALIGNMENT == 0 for layer in layers), (name, counts)
