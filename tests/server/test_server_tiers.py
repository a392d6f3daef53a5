"""The server with keys and values off the device: the same texts, one budget for all, and what fits nowhere is said."""

import errno
import functools
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from support.bundled import bundled
from support.live_server import PATIENCE, Json, LiveServer, PausableEngine, error_of, sampled, text_of, until

from forerun.cli import serve
from forerun.cli.serve_options import ServeOptions
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.kv.cache import KVShape
from forerun.kv.kv_tiers import TIERS, KVMemory, NoRoomError, layer_bytes, min_device_bytes, place
from forerun.kv.offloaded import CopyEngine, OffloadedCache, OffloadError, Parts
from forerun.server import settings as settings_of
from forerun.server.admission import Admission, SchedulerLimits
from forerun.server.scheduler import OFFLOADED_CHUNKS
from forerun.server.settings import read_settings

NEW = 12
SMALL = LongContextConfig(cache_budget=64, chunk=4, gamma1=2, gamma2=4, paced=False, window=24)
"""Sparse caches that are smaller than the texts here."""
WORDS = "the quick brown fox jumps over the lazy dog and sleeps in the sun until the rain comes back "


def prompt(words: int, seed: int = 0) -> str:
    """A text with something to draft."""
    every = WORDS.split()
    return " ".join(every[(seed + place * (1 + seed % 3)) % len(every)] for place in range(words))


@pytest.fixture(scope="module")
def model() -> Any:
    return bundled()


@pytest.fixture(scope="module")
def plain(model: Any) -> Engine:
    return Engine(model[0], "none", tokenizer=model[1])


def tokens(one: Engine, text: str, new: int = NEW) -> int:
    """Places that the text's cache has."""
    with one.batch() as batch:
        return batch.tokens(one.requests([text], max_new_tokens=new)[0])


def engine(model: Any, drafter: str, device: int, host: int | None = None, **more: Any) -> Engine:
    memory = KVMemory(device, host, **more)
    return Engine(model[0], drafter, settings=SMALL, tokenizer=model[1], prefix_cache=1 << 24, kv_memory=memory)


def asked(text: str, seed: int = 0, new: int = NEW, **more: Any) -> Json:
    return {"model": "bundled", "prompt": text, "max_tokens": new, "temperature": seed % 2, "seed": seed, **more}


@functools.cache
def wanted(one: Engine, text: str, seed: int = 0, new: int = NEW) -> str:
    return one.generate(text, max_new_tokens=new, **(sampled(seed) if seed % 2 else {})).texts[0]


def tiers_of(server: LiveServer) -> Any:
    return server.app.state.service.engine.tiers


def at_once(server: LiveServer, bodies: Sequence[Json]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(server.post, body) for body in bodies]]


@pytest.fixture
def no_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer stays on the device."""
    monkeypatch.setattr(Admission, "_wanted", lambda *_: 1 << 40)


def nothing_taken(server: LiveServer) -> None:
    server.wait_idle()
    assert tiers_of(server).taken == dict.fromkeys(TIERS, 0)
    assert server.metric("forerun:kv_tier_bytes") == server.metric("forerun:kv_cache_usage_perc") == 0


def watched(server: LiveServer) -> list[dict[str, int]]:
    """What is taken of each tier, and how many run, before each step."""
    seen, step = list[dict[str, int]](), server.scheduler._step
    server.scheduler._step = lambda: seen.append({**tiers_of(server).taken, "n": server.scheduler.running}) or step()
    return seen


def drafting_bytes(one: Engine, longest: int) -> int:
    """Most bytes that drafting takes for a request of so many tokens."""
    return sum(source.needs(longest) for source in one.level.planner.sources)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["trie", "auto", "low-rank"])
def test_texts_at_once_are_those_of_a_server_without_tiers(drafter, model, plain, serve, tmp_path):
    texts = [prompt(words, seed) for seed, words in enumerate((5, 260, 1000, 9, 350, 150))]
    expected = [wanted(plain, text, seed) for seed, text in enumerate(texts)]
    kv = plain.target.kv
    longest = max(tokens(plain, text) for text in texts)
    drafting = drafting_bytes(Engine(model[0], drafter, settings=SMALL, tokenizer=model[1]), longest)
    device = min_device_bytes(kv, longest) + kv.nbytes * 100 + 2 * drafting  # the longest, and a short one beside it
    assert device - drafting < kv.nbytes * longest
    one = engine(model, drafter, device, min_device_bytes(kv, longest) // 2, folder=tmp_path)
    held = PausableEngine(one)
    server = serve(held, SchedulerLimits(1, rows=4))
    seen = watched(server)
    for _ in range(2):  # the second time there is more to draft
        held.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(at_once, server, [asked(text, seed) for seed, text in enumerate(texts)])
            until(lambda: server.scheduler.running + server.scheduler.waiting == 6)
            held.gate.set()
            assert [text_of(each) for each in answers.result(PATIENCE)] == expected
    assert one.tiers.copy_engine.written > kv.nbytes * longest // 4
    assert max(each["n"] for each in seen) > 1
    assert 0 < max(each["device"] for each in seen) <= device
    assert 0 < max(each["host"] for each in seen) <= min_device_bytes(kv, longest) // 2
    assert max(each["file"] for each in seen) > 0
    assert server.metric('forerun:kv_tier_copied_bytes_total{way="out"}') == one.tiers.copy_engine.written
    assert server.metric('forerun:kv_tier_limit_bytes{tier="device"}') == device
    nothing_taken(server)
    assert list(tmp_path.iterdir()) == []


def test_texts_on_the_device_as_a_whole_still_share_what_they_begin_with(model, plain, serve):
    text = prompt(200)
    server = serve(engine(model, "trie", 1 << 26, 0), SchedulerLimits(1, rows=1))
    assert text_of(server.post(asked(text))) == text_of(server.post(asked(text))) == wanted(plain, text)
    assert server.metric("forerun:prefix_cache_hits_total") > 0
    assert server.metric("forerun:kv_tier_copied_bytes_total") == 0


def test_what_fits_in_no_tier_is_refused_with_the_numbers(model, plain, serve):
    kv, text = plain.target.kv, prompt(300)
    size = tokens(plain, text)
    short = engine(model, "none", min_device_bytes(kv, size) - 1, 1 << 30)
    low = engine(model, "none", min_device_bytes(kv, size), 1000)
    for one, why in (
        (short, f"needs {min_device_bytes(kv, size):,} bytes on the device, .*; {min_device_bytes(kv, size) - 1:,} of"),
        (low, f"needs {sum(layer_bytes(kv, size).values()):,} bytes off the device; 1,000 of 1,000 are free"),
    ):
        server = serve(one, SchedulerLimits(1))
        error = error_of(server.post(asked(text)), 400)
        assert (error["type"], error["code"]) == ("invalid_request_error", "too_large")
        assert re.search(why, error["message"]) and "shorten the prompt" in error["message"]
        assert text_of(server.post(asked("Hi", new=1)))


def test_a_client_that_goes_frees_all_tiers_for_who_waits(model, plain, serve):
    """And who finds no place to wait is told so. There is room for the buffers of one such text, and beside for two."""
    text, kv = prompt(200), plain.target.kv
    size = tokens(plain, text, 80)
    held = PausableEngine(engine(model, "none", min_device_bytes(kv, size), 2 * sum(layer_bytes(kv, size).values())))
    server = serve(held, SchedulerLimits(1, rows=4, waiting=1), max_tokens=80)
    with ThreadPoolExecutor(1) as pool:
        held.gate.clear()
        with server.http.stream("POST", "/v1/completions", json=asked(text, 0, 80, stream=True)):
            until(lambda: server.scheduler.running == 1)
            second = pool.submit(server.post, asked(text, 3, 80))
            until(lambda: server.scheduler.waiting == 1)
            assert min(server.metric(f'forerun:kv_tier_bytes{{tier="{tier}"}}') for tier in ("device", "host")) > 0
            assert error_of(server.post(asked(text, 0, 80)), 429)["code"] == "queue_full"
        held.gate.set()
        assert text_of(second.result(PATIENCE)) == wanted(plain, text, 3, 80)
    assert server.metric("forerun:generation_tokens_total") < 160
    nothing_taken(server)


def test_a_text_leaves_others_their_buffers_while_there_are_free_places(model, plain, serve):
    text, kv = prompt(300), plain.target.kv
    size = tokens(plain, text)
    device = int(2.3 * kv.nbytes * size)
    for rows, host, together, away in (
        (2, None, 2, False),  # nobody else can come
        (3, None, 3, True),  # the second one leaves so much that a third one can
        (3, 0, 2, False),  # it can go nowhere else
    ):
        held = PausableEngine(engine(model, "none", device, host))
        server = serve(held, SchedulerLimits(1, rows=rows))
        seen = watched(server)
        held.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(at_once, server, [asked(text)] * 3)
            until(lambda one=server.scheduler: one.running + one.waiting == 3)
            held.gate.set()
            assert {text_of(each) for each in answers.result(PATIENCE)} == {wanted(plain, text)}
        assert max(each["n"] for each in seen) == together
        assert (max(each["host"] for each in seen) > 0) == away


@pytest.mark.usefixtures("no_layer_stays")
def test_a_long_prompt_off_the_device_is_read_in_pieces_while_others_go_on(model, plain, serve):
    long, short = prompt(700), prompt(5)
    one = engine(model, "none", 2 * min_device_bytes(plain.target.kv, tokens(plain, long)), None)
    server = serve(one, SchedulerLimits(1, rows=2, step=16), max_tokens=100)
    scheduler, unread = server.scheduler, list[int]()
    step = scheduler._step
    scheduler._step = lambda: (unread.append(scheduler._batch.unread), step())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, asked(short, 0, 100))
        until(lambda: len(unread) > 1)
        second = pool.submit(server.post, asked(long))
        assert text_of(first.result(PATIENCE)) == wanted(plain, short, 0, 100)
        assert text_of(second.result(PATIENCE)) == wanted(plain, long)
    read = [before - after for before, after in pairwise(unread) if before > after]
    assert max(read) == OFFLOADED_CHUNKS * 16 and len(read) > 5
    assert one.tiers.copy_engine.fetched > 0


def test_a_full_disk_ends_one_request_and_frees_everything(model, plain, serve, tmp_path, monkeypatch):
    long, short = prompt(300), prompt(9)
    kv, size = plain.target.kv, tokens(plain, long)
    server = serve(engine(model, "trie", kv.nbytes * size - 1, 0, folder=tmp_path), SchedulerLimits(1, rows=4))

    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        bad, good, streamed = at_once(server, (asked(long), asked(short), asked(long, stream=True)))
        error = error_of(bad, 500)
        assert text_of(good) == wanted(plain, short)
        assert "kv_memory_failed" in streamed.text and "[DONE]" not in streamed.text
    assert error["code"] == "kv_memory_failed" and "No space left on device" in error["message"]
    assert str(tmp_path) not in error["message"]
    nothing_taken(server)
    assert text_of(server.post(asked(long))) == wanted(plain, long)


THREE = [prompt(words, seed) for seed, words in enumerate((300, 250, 350))]


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("no_layer_stays")
@pytest.mark.parametrize("drafter", ["none", "low-rank", "retrieval"])
def test_copies_that_fail_end_one_request_and_no_other(drafter, model, plain, serve):
    texts = THREE
    expected = [wanted(plain, text) for text in texts]
    kv, size = plain.target.kv, max(tokens(plain, text) for text in texts)
    drafting = drafting_bytes(Engine(model[0], drafter, settings=SMALL, tokenizer=model[1]), size)
    one = engine(model, drafter, 3 * (min_device_bytes(kv, size) + drafting), 1 << 30)
    server = serve(one, SchedulerLimits(1, rows=3))
    write, broken = CopyEngine.write, threading.Event()

    def failing(copy_engine: CopyEngine, parts: Parts) -> Any:
        def fail() -> None:
            broken.set()
            raise RuntimeError("in the test")

        mine = parts[0][0].untyped_storage().data_ptr() == chosen
        return copy_engine.run_in_order(fail) if mine and parts[0][0].shape[2] < 100 else write(copy_engine, parts)

    chosen = 0
    leave = OffloadedCache.write_back

    def choosing(cache: OffloadedCache, layer: int, count: int) -> None:
        nonlocal chosen
        if not chosen and cache.length > 0:  # the first that decodes
            chosen = cache._layers[layer][0].untyped_storage().data_ptr()
        leave(cache, layer, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, "write", failing)
        patch.setattr(OffloadedCache, "write_back", choosing)
        answers = at_once(server, [asked(text) for text in texts])
    assert broken.is_set()
    ((failed, text),) = ((each, text) for each, text in zip(answers, expected, strict=True) if each.status_code != 200)
    assert error_of(failed, 500)["code"] == "kv_memory_failed"
    assert [text_of(each) for each in answers if each is not failed] == [each for each in expected if each != text]
    nothing_taken(server)
    assert text_of(server.post(asked(texts[0]))) == expected[0]


@pytest.mark.usefixtures("no_layer_stays")
def test_a_draft_whose_keys_cannot_be_fetched_ends_no_request(model, plain, serve, monkeypatch):
    one = engine(model, "low-rank", 1 << 26, None)
    server = serve(one, SchedulerLimits(1, rows=3))
    caches, drafting, source = list[OffloadedCache](), threading.Event(), one.level.planner.own[-1]
    fetch, propose = OffloadedCache._fetch_now, source.propose

    def fetching(cache: OffloadedCache, rows: Any) -> Any:
        with monkeypatch.context() as patch:
            if drafting.is_set() and (not caches or cache is caches[0]):
                caches.append(cache)
                patch.setattr(CopyEngine, "fetch_now", Mock(side_effect=OffloadError("in the test")))
            return fetch(cache, rows)

    def proposing(*told: Any) -> Any:
        drafting.set()
        try:
            return propose(*told)
        finally:
            drafting.clear()

    monkeypatch.setattr(OffloadedCache, "_fetch_now", fetching)
    monkeypatch.setattr(source, "propose", proposing)
    answers = at_once(server, [asked(text) for text in THREE])
    assert caches and [text_of(answer) for answer in answers] == [wanted(plain, text) for text in THREE]
    nothing_taken(server)


def test_what_is_freed_is_free_whoever_still_has_the_cache(model, plain):
    one = engine(model, "none", min_device_bytes(plain.target.kv, 300), None)
    for size in (20, 300):
        cache = one.tiers.cache(size)
        assert cache.offloaded == (size == 300) and one.tiers.taken["device"] > 0
        one.tiers.free(cache)
        assert one.tiers.taken == dict.fromkeys(TIERS, 0) and not cache.layers


def test_threads_share_one_budget_and_nothing_of_it_is_lost(model, plain):
    least = min_device_bytes(plain.target.kv, 64)
    tiers, worst = engine(model, "none", 8 * least, 12 * least).tiers, dict.fromkeys(TIERS, 0)

    def work(seed: int) -> int:
        found = 0
        for turn in range(60):
            try:
                cache = tiers.cache(64 * (1 + (seed + turn) % 3))
            except NoRoomError:
                found += 1
                continue
            for tier, size in tiers.taken.items():
                worst[tier] = max(worst[tier], size)
            if turn % 2:
                tiers.free(cache)
                tiers.free(cache)  # once is enough
        return found

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) < 300
    assert tiers.taken == dict.fromkeys(TIERS, 0)
    assert 0 < worst["device"] <= 8 * least and worst["host"] <= 12 * least


def test_a_file_has_its_limit(plain, tmp_path):
    kv: KVShape = plain.target.kv
    layer = min_device_bytes(kv, 64) // 2
    memory = KVMemory(2 * layer, layer, tmp_path, file=3 * layer)
    found = place(memory, dict.fromkeys(TIERS, 0), kv, 200)
    assert found.nbytes == {"device": 2 * layer, "host": layer, "file": 3 * layer}
    with pytest.raises(NoRoomError, match=rf"{layer:,} of {layer:,} are free in the host's memory, and {layer:,} of"):
        place(memory, {"device": 0, "host": 0, "file": 2 * layer}, kv, 200)
    with pytest.raises(ValueError, match="file is -1"):
        KVMemory(1, file=-1)


def test_settings_say_where_keys_and_values_go(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(settings_of, "free_memory", lambda device: 10 << 30)
    folder, file, two = tmp_path / "new", tmp_path / "serve.toml", {"ray": True, "replicas": 2}
    file.write_text(f'kv_memory = "2GiB"\nkv_host_memory = "1GiB"\nkv_folder = "{folder}"\n')
    told = read_settings({"kv_folder_limit": "3GiB"}, file)
    assert told.tiers(cpu) == KVMemory(2 << 30, 1 << 30, folder, file=3 << 30) and folder.is_dir()
    on_device = {"kv_memory": "2GiB"}
    for flags in ({}, on_device):  # as before: how much is admitted
        assert read_settings(flags).tiers(cpu) is None
    assert read_settings({**on_device, "kv_host_memory": "0"}).tiers(cpu) == KVMemory(2 << 30, 0, None, file=0)
    in_folder = {**on_device, "kv_folder": str(folder)}
    found = read_settings(in_folder).tiers(cpu)
    assert found.host == 4 << 30 and found.file > 0  # half of what the device leaves
    assert read_settings({**in_folder, **two}).tiers(cpu).host == 2 << 30
    one, both = read_settings({}), read_settings(two)
    assert one.limits(cpu).memory == 2 * both.limits(cpu).memory
    for each in (one, both):  # of what is free there are four parts for texts, and one for prefixes
        assert each.limits(cpu).memory == 4 * each.prefix_limit(cpu) > 0
    assert [read_settings({"prefix_cache": size}).prefix_limit(cpu) for size in (0, "1MiB")] == [0, 1 << 20]


@pytest.mark.parametrize(("told", "why"), [
    ({"kv_host_memory": "1GiB"}, r"kv_host_memory: .*does not fit on the device; set kv_memory, too"),
    ({"kv_folder": "x"}, r"kv_folder: .*set kv_memory, too"),
    ({"kv_memory": "1GiB", "kv_folder_limit": "1GiB"}, r"kv_folder_limit: .*set kv_folder, too"),
    ({"kv_memory": "1GiB", "kv_host_memory": "much"}, r"kv_host_memory: .*number of bytes.*4GiB"),
])  # fmt: skip
def test_wrong_settings_are_named(told, why):
    with pytest.raises(ValueError, match=why) as wrong:
        read_settings(told)
    assert str(wrong.value).count(";") == str(wrong.value).count("; set")  # one is wrong, and no other


def test_the_command_builds_it_and_says_what_is_not_shared(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("forerun.server.http_server.DrainingServer", served := Mock())
    tiers: Any = {"kv_memory": "3MB", "kv_host_memory": "1MB", "kv_folder": tmp_path, "kv_folder_limit": "5MB"}
    with caplog.at_level("INFO"):
        serve.run(ServeOptions(**tiers, drafter="trie", port=0))
    service = served.call_args.args[0].state.service
    service.scheduler.close()
    assert service.engine.tiers.memory == KVMemory(3_000_000, 1_000_000, tmp_path, file=5_000_000)
    assert f"2.9 MiB on the device, 1.0 MiB in the host's memory, 4.8 MiB in files in {tmp_path}" in caplog.text
    assert "share no prefixes" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        serve.run(ServeOptions(kv_memory="3MB", kv_folder=tmp_path / "file", port=0))
