"""Chunks and rows that the GPU gathers itself, in Triton's interpreter."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support.streams import Stream, use_streams

from benchmarks.gpu.counting import LaunchCounter
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.gpu.gather import gather_chunks
from forerun.kv.cache import KVShape, LayerShape
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import KVMemory, Tiers, layer_bytes, min_device_bytes
from forerun.kv.offloaded import OffloadedCache
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig

CPU, ROOM, HEADS, DIM = torch.device("cpu"), 256, 2, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_those_of_their_heads(dtype):
    """Of rows with gaps between heads, and of a width that is no power of two; none at all is no launch."""
    rows = torch.randn(1, 3, 43, 24).to(dtype)[:, :, 3:]
    head, chunk = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 4, 1, 3])
    found = gather_chunks(rows, head, chunk, 8, CPU)
    right = torch.stack([rows[0, h, 8 * c : 8 * c + 8] for h, c in zip(head.tolist(), chunk.tolist(), strict=True)])
    assert torch.equal(found, right)
    assert gather_chunks(rows, head[:0], chunk[:0], 8, CPU).shape == (0, 8, 24)


def tiers(layers: int, resident: int = 0, **more: object) -> Tiers:
    shape = KVShape(dict.fromkeys(range(layers), LayerShape(HEADS, DIM, DIM, 4)))
    device = min_device_bytes(shape, ROOM) + resident * layer_bytes(shape, ROOM)[0]
    return Tiers(KVMemory(device, **more), CPU, shape, torch.float32)  # type: ignore[arg-type]


def read(caches: Sequence[FullCache], layers: int, count: int) -> None:
    """Let all caches hold equal random tokens."""
    for layer in range(layers):
        qkv = [torch.randn(1, heads, count, DIM) for heads in (2 * HEADS, HEADS, HEADS)]
        for cache in caches:
            cache.store(layer, *qkv, block_of(count, cache), AttentionSpec(1.0))
    for cache in caches:
        cache.commit(block_of(count, cache), [])


def block_of(count: int, cache: FullCache) -> Block:
    return Block(np.zeros(count, np.int64), DraftTree.empty(), cache.length)


@pytest.mark.parametrize("resident", [0, 1])
def test_rows_of_all_layers_are_brought_at_once(resident, monkeypatch):
    made = tiers(4, resident)
    stream = use_streams(monkeypatch, made.copy_engine)
    away, here = made.cache(ROOM), FullCache(ROOM)
    assert isinstance(away, OffloadedCache) and len(away.offloaded_layers) == 4 - resident
    read([away, here], 4, 40)
    for first, last in ((0, 40), (33, 40), (39, 39)):
        right = torch.stack([torch.cat(here.read(layer, first, last)) for layer in range(4)])
        assert torch.equal(away.read_together(first, last), right)
    assert not stream.waits
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: False)
    assert away.read_together(0, 40) is None


def test_rows_in_two_tiers_are_not_brought_at_once(tmp_path, monkeypatch):
    layer = tiers(4).shape.layers[0].nbytes * ROOM
    made = tiers(4, host=2 * layer, folder=tmp_path)
    use_streams(monkeypatch, made.copy_engine)
    away = made.cache(ROOM)
    read([away], 4, 3)
    assert away.read_together(0, 3) is None


def synced(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchCounter, Stream]:
    """What a retrieval cache launches and waits for when its offloaded source has grown."""
    made = tiers(layers)
    stream = use_streams(monkeypatch, made.copy_engine)
    caches = [made.cache(ROOM), FullCache(ROOM)]
    read(caches, layers, 120)
    views = [RetrievalCache(cache, RetrievalConfig(64, 4)) for cache in caches]
    for view in views:
        view.sync()
    read(caches, layers, 5)
    stream.waits.clear()
    with LaunchCounter() as launches:
        views[0].sync()
    views[1].sync()
    for layer in range(layers):
        for mine, right in zip(*(view._rows[layer] for view in views), strict=True):
            held = views[0].held
            assert [view.refreshes for view in views] == [1, 1] and torch.equal(mine[:, :, :held], right[:, :, :held])
    return launches, stream


def test_a_retrieval_cache_follows_an_offloaded_source_without_waiting(monkeypatch):
    """And with as many operations whatever the number of layers."""
    counts = []
    for layers in (3, 5):
        launches, stream = synced(layers, monkeypatch)
        counts.append({name: count for name, count in launches.kernels.items() if name != "set_"})  # the interpreter's
        assert not stream.waits
    assert counts[0] == counts[1] and sum(counts[0].values()) <= 6  # of which the interpreter's are three
