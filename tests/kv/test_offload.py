"""Keys and values that are not on the device: the same bits, the least bytes, and clear errors where none fit."""

import errno
import functools
import gc
import json
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from support.all_keys import AllKeysView
from support.batches import finish, repeated
from support.compiled_models import MODELS, SHAPE
from support.tiny import ARCHITECTURES, LAYOUTS
from support.tiny import build as tiny_of
from transformers import PreTrainedModel
from typer.testing import CliRunner

from forerun.cli import app
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.kernels.runtime import vector_ir
from forerun.kv import kv_tiers
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import KVMemory, NoRoomError, min_device_bytes
from forerun.kv.offloaded import CopyEngine, OffloadedCache, Parts, by_head, size
from forerun.kv.retrieval import RetrievalCache
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.scorer import Scorer

NATIVE = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")
SETTINGS = LongContextConfig(cache_budget=64, chunk=4, gamma1=2, gamma2=4, paced=False, window=24)
PROMPTS = (700, 40, 301)
ROOM = 24
"""Tokens that are generated."""


@functools.cache
def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One of six layers; two of them are on the device in any case."""
    class_name, extra = MODELS[name]
    made = getattr(transformers, class_name)
    torch.manual_seed(3)
    return made(made.config_class(**{**SHAPE, **extra, "num_hidden_layers": 6})).to(dtype).eval()


prompt = partial(repeated, period=60)


def engines(
    one: PreTrainedModel, share: float = 0.0, lengths: Sequence[int] = PROMPTS, **more: Any
) -> tuple[Engine, Engine]:
    """Without offloading, and with room on the device for the buffers of some texts and a share of the longest."""
    plain = Engine(one, "none", settings=SETTINGS, prune_drafts=False)
    kv = plain.target.kv
    buffers = sum(min_device_bytes(kv, length + ROOM + plain.budget) for length in lengths)
    memory = KVMemory(buffers + int(share * kv.nbytes * max(lengths)), **more)
    return plain, Engine(one, "none", settings=SETTINGS, prune_drafts=False, kv_memory=memory)


def texts(one: Engine, drafter: str, lengths: Sequence[int], **how: Any) -> list[list[int]]:
    one.set_drafter(drafter, SETTINGS)
    found = one.generate([prompt(length, length) for length in lengths], max_new_tokens=ROOM, **how).requests
    assert drafter == "none" or sum(sum(request.stats.accepted) for request in found) > 0
    return [request.generated.tolist() for request in found]


DRAFTERS = ("none", "trie", "retrieval", "low-rank", "triforce-trie")
PLACES = [(dtype, place) for dtype in (torch.float32, torch.bfloat16) for place in ("file and host", "host")]


@NATIVE
@pytest.mark.parametrize(("dtype", "place", "drafters"), [
    (torch.float32, "file and host", ("trie", "low-rank")),
    *(pytest.param(*each, DRAFTERS, marks=pytest.mark.matrix) for each in PLACES),
], ids=str)  # fmt: skip
def test_every_bit_is_that_of_a_text_on_the_device(dtype, place, drafters, tmp_path):
    tiers = {} if place == "host" else {"host": 300_000, "folder": tmp_path}
    plain, away = engines(model("qwen2", dtype), **tiers)
    assert isinstance(away.target, CompiledScorer)
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 3, "temperature": 0.8}):
        wanted = texts(plain, "none", PROMPTS, **how)
        for drafter in drafters:
            assert texts(away, drafter, PROMPTS, **how) == wanted, (drafter, how)
    assert away.tiers.copy_engine.fetched > 0
    gc.collect()
    assert not any(away.tiers.taken.values())


@NATIVE
@pytest.mark.parametrize("share", [0.0, 0.5, 9.0])
def test_the_device_is_filled_first(share):
    plain, away = engines(model(), share, (700,))
    tokens, kv = 764, plain.target.kv
    cache = away.prefill(prompt(700), 64)
    taken, limit = away.tiers.taken, away.tiers.memory.device
    assert taken["device"] <= limit
    if share > 1:
        assert type(cache) is FullCache and taken["host"] == 0
        return
    assert isinstance(cache, OffloadedCache)
    layer = min_device_bytes(kv, tokens) // 2
    assert len(cache.offloaded_layers) == (len(kv.layers) - (limit - 2 * layer) // layer)
    assert taken["host"] == len(cache.offloaded_layers) * layer


@NATIVE
def test_a_prompt_is_brought_away_once_and_does_not_come_back(monkeypatch):
    _, away = engines(model())
    copy_engine, length = away.tiers.copy_engine, 3001
    away.tiers.memory = KVMemory(min_device_bytes(away.target.kv, length + 64))
    fetched: list[int] = []
    leave = OffloadedCache.write_back
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedCache, "write_back", lambda *given: fetched.append(copy_engine.fetched) or leave(*given))
        cache = away.prefill(prompt(length), 64)
    whole = away.target.kv.nbytes * (length - 1)
    assert isinstance(cache, OffloadedCache) and len(cache.offloaded_layers) == len(away.target.kv.layers)
    assert copy_engine.written == whole and fetched[-1] == 0
    request = away.requests(prompt(length), max_new_tokens=5)[0]
    request.eos_token_ids = frozenset()
    before = copy_engine.fetched
    list(away.run([request], caches=[cache]))
    assert 4 * whole < copy_engine.fetched - before <= 1.1 * 5 * whole  # five passes, of which two layers were there
    assert copy_engine.written - whole <= 5 * away.target.kv.nbytes


@NATIVE
def test_the_next_layer_comes_while_one_is_computed(monkeypatch):
    asked: list[str] = []
    fetch = CopyEngine.fetch
    _, away = engines(model(), lengths=(700,))
    cache = away.prefill(prompt(700), 80)
    assert isinstance(cache, OffloadedCache) and len(cache.offloaded_layers) == 6
    monkeypatch.setattr(CopyEngine, "fetch", lambda *given: asked.append("fetch") or fetch(*given))
    leave = OffloadedCache.write_back
    monkeypatch.setattr(OffloadedCache, "write_back", lambda *given: asked.append("done") or leave(*given))
    list(away.run(away.requests(prompt(700), max_new_tokens=1), caches=[cache]))
    # layers 0 and 1 are there already; each other is sent for before the one before it is done
    assert asked[:11] == ["done", *["fetch", "done"] * 5]


def test_what_a_gpu_would_copy_lies_in_one_piece():
    """Torch copies anything else between devices through memory that is not pinned, and waits."""
    to, source = torch.zeros(1, 3, 20, 4), torch.randn(1, 3, 24, 4)
    parts = list(by_head(to[:, :, 5:17], source[:, :, 2:14]))
    assert len(parts) == 3
    assert all(t.is_contiguous() for part in parts for t in part)
    for mine, given in parts:
        mine.copy_(given)
    assert torch.equal(to[:, :, 5:17], source[:, :, 2:14])
    assert not to[:, :, :5].any() and not to[:, :, 17:].any()
    whole = torch.zeros(1, 600, 8, 4), torch.ones(1, 600, 8, 4)  # chunks that were gathered: one copy, not 600
    assert len(list(by_head(*whole))) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "deepseek_v3", "mixtral"])
def test_any_decoder_can_be_offloaded(name):
    class_name, extra = {**ARCHITECTURES, **LAYOUTS}[name]
    one = tiny_of(class_name, {**extra, "num_hidden_layers": 5}, seed=2)
    plain = Engine(one, "none", settings=SETTINGS, prune_drafts=False)
    memory = KVMemory(min_device_bytes(plain.target.kv, 256))
    away = Engine(one, "trie", settings=SETTINGS, prune_drafts=False, prefill_block=16, kv_memory=memory)
    assert not isinstance(away.target, CompiledScorer)
    ids = prompt(70)
    found, wanted = (one.generate(ids, max_new_tokens=24, do_sample=False).requests[0] for one in (away, plain))
    assert found.generated.tolist() == wanted.generated.tolist()
    assert away.tiers.copy_engine.fetched > 0


@NATIVE
def test_a_text_that_was_read_once_goes_on_again():
    plain, away = engines(model())
    ids = prompt(500)
    found: list[list[list[int]]] = [[], []]
    for one, mine in zip((plain, away), found, strict=True):
        one.set_drafter("trie", SETTINGS)
        cache = one.prefill(ids, ROOM + 80)
        for seed in range(3):
            cache.truncate(499)
            request = one.requests(ids, max_new_tokens=ROOM, do_sample=True, seed=seed)[0]
            list(one.run([request], caches=[cache]))
            mine.append(request.generated.tolist())
    assert found[0] == found[1]


@NATIVE
def test_a_full_disk_ends_the_request_and_frees_everything(tmp_path, monkeypatch):
    _, away = engines(model(), lengths=(500,), host=0, folder=tmp_path)

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"bytes of keys and values cannot be stored in .*: No space left"):
        away.generate(prompt(500), max_new_tokens=4)
    assert away.tiers is not None and not any(away.tiers.taken.values())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(away.generate(prompt(500), max_new_tokens=4, do_sample=False).requests[0].generated) == 4


@NATIVE
def test_a_copy_that_fails_ends_its_request_alone(monkeypatch):
    plain, away = engines(model(), lengths=(700, 301))
    assert away.tiers is not None
    wanted = texts(plain, "none", (301,), do_sample=False)[0]
    bad, good = (away.requests(prompt(n, n), max_new_tokens=ROOM, do_sample=False)[0] for n in (700, 301))
    fetch, fail = CopyEngine.fetch, Mock(side_effect=OSError("in the test"))

    def failing(copy_engine: CopyEngine, parts: Parts) -> Any:
        long = size(parts) > 600 * away.target.kv.nbytes // 6
        return copy_engine.run_in_order(fail) if long else fetch(copy_engine, parts)

    monkeypatch.setattr(CopyEngine, "fetch", failing)
    with away.batch() as batch:
        batch.admit(bad, reserve=away.tiers.room_for([batch.tokens(good)]))
        batch.admit(good)
        finish(batch)
    assert isinstance(bad.error, OSError) and good.error is None
    assert good.generated.tolist() == wanted
    del batch
    gc.collect()
    assert not any(away.tiers.taken.values())


@NATIVE
def test_rows_are_moved_at_home_whatever_mode_the_caller_is_in():
    kv = Engine(model(), "none").target.kv
    away = Engine(model(), "none", kv_memory=KVMemory(min_device_bytes(kv, 300)))
    with torch.inference_mode():
        cache = away.tiers.cache(300)
        block = Block(np.array([5]), DraftTree(np.array([7, 8]), np.array([-1, -1])), 0)
        for layer, shape in away.target.kv.layers.items():
            rows = torch.arange(3.0).view(1, 1, 3, 1).expand(1, shape.heads, 3, shape.dim)
            cache.append(layer, rows, rows)
        cache.commit(block, [1])
        assert cache.lost is None
    assert isinstance(cache, OffloadedCache) and cache.length == 2
    for layer in cache.offloaded_layers:
        assert cache._layers[layer][0][0, 0, :2, 0].tolist() == [0.0, 2.0]


@NATIVE
def test_what_fits_nowhere_and_a_view_that_reads_all_keys_in_each_pass_are_refused():
    one = model()
    with pytest.raises(
        NoRoomError, match=r"a sequence of 568 tokens needs 393,216 bytes on the device.*; 1,000 of 1,000"
    ):
        Engine(one, "none", kv_memory=1000).generate(prompt(500), max_new_tokens=4)
    small = KVMemory(400_000, host=50_000)
    with pytest.raises(NoRoomError, match=r"off the device; 50,000 of 50,000 are free, and no folder"):
        Engine(one, "none", kv_memory=small).generate(prompt(500), max_new_tokens=4)
    for wrong in ({"device": -1}, {"device": 1, "host": -1}, {"device": 1, "bandwidth": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            KVMemory(**wrong)
    _, away = engines(one, lengths=(500,))
    with pytest.raises(ValueError, match="a AllKeysView reads all keys in each pass"):
        AllKeysView(away.tiers.cache(500 + ROOM))


@NATIVE
@pytest.mark.parametrize("name", ["RetrievalCache", "LowRankCache"])
def test_a_sparse_cache_over_it_copies_what_it_chooses(name):
    plain, away = engines(model(), lengths=(700,))
    seen = []
    for one in (plain, away):
        one.set_drafter({"RetrievalCache": "retrieval", "LowRankCache": "low-rank"}[name], SETTINGS)
        one.target.keep_queries(0)
        cache = one.prefill(prompt(700), 80)
        (request,) = one.requests(prompt(700), max_new_tokens=4)
        with one.batch() as batch, torch.inference_mode():
            batch.admit(request, cache)
            while len(request.generated) < 3:
                batch.step()
            (view,) = cache.views
            assert type(view).__name__ == name
            if isinstance(view, RetrievalCache):
                view.refresh()
            before = away.tiers.copy_engine.fetched
            q, k = (torch.randn(1, heads, 1, 16, generator=torch.Generator().manual_seed(4)) for heads in (6, 2))
            block = Block(np.array([7]), DraftTree.empty(), view.length)
            seen.append(view.attend(3, q, k, k, block, cache.specs[3]))
            if isinstance(view, RetrievalCache):
                view.refresh()  # by the same queries, so nothing is chosen anew
    moved = away.tiers.copy_engine.fetched - before
    assert moved < away.target.kv.nbytes // 6 * 64  # its budget is 64 tokens
    assert torch.allclose(*seen, atol=1e-5)


@NATIVE
def test_a_cache_of_a_fixed_size_says_when_it_is_full():
    kv = Scorer(model()).kv
    cache = Engine(model(), "none", kv_memory=min_device_bytes(kv, 200)).prefill(prompt(100), 60)
    assert isinstance(cache, OffloadedCache) and cache.capacity == 256
    rows = {i: tuple(torch.zeros(1, t.shape[1], 200, t.shape[3]) for t in cache.read(i, 0, 1)) for i in cache.layers}
    with pytest.raises(ValueError, match="room for 256 tokens, not for 299"):
        cache.extend(rows)


@pytest.mark.matrix
def test_the_commands_know_it(tmp_path, monkeypatch):
    written, write_back = list[int](), OffloadedCache.write_back
    monkeypatch.setattr(OffloadedCache, "write_back", lambda *given: written.append(1) or write_back(*given))
    text = ("the quick brown fox jumps over the lazy dog and then it sleeps in the sun. " * 60)[:1500]
    told = ["generate", "-p", text, "-n", "8", "--json", "--drafter", "trie"]
    plain = CliRunner().invoke(app, told)
    assert not written
    away = CliRunner().invoke(
        app, [*told, "--kv-memory", "3.5MB", "--kv-host-memory", "0", "--kv-folder", str(tmp_path)]
    )
    assert plain.exit_code == away.exit_code == 0, away.output
    assert json.loads(plain.stdout)["text"] == json.loads(away.stdout)["text"] and written
    for wrong, why in (
        (["--kv-folder", "x"], "--kv-folder is for what does not fit on the device; add --kv-memory"),
        (["--kv-memory", "much"], "Invalid value for '--kv-memory': 'much'"),
    ):
        result = CliRunner().invoke(app, ["generate", "-p", "Hi", *wrong])
        assert result.exit_code == 2 and why in result.output


def test_a_text_that_is_freed_while_another_is_placed_does_not_wait_for_itself(monkeypatch):
    """As where the garbage collector closes an abandoned stream in the middle of it."""
    tiers = Engine(tiny_of(*ARCHITECTURES["llama"], seed=1), "none", kv_memory=1 << 24).tiers
    abandoned, place, made = tiers.cache(10), kv_tiers.place, list[FullCache]()

    def placed(*given: Any) -> Any:
        tiers.free(abandoned)
        return place(*given)

    monkeypatch.setattr(kv_tiers, "place", placed)
    thread = threading.Thread(target=lambda: made.append(tiers.cache(20)), daemon=True)
    thread.start()
    thread.join(20)
    assert made, "it waits for a lock that it holds"
    made.clear()
    gc.collect()
    assert not any(tiers.taken.values())
