"""The index of a server: what it starts with, what it may take, who shares it, and that it outlives the server."""

import copy
import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import httpx
import numpy as np
import pytest
from support.bundled import bundled
from support.commands import start
from support.live_server import PATIENCE, Json, LiveServer, bundled_engine, free_socket, ready, text_of, until
from support.processes import status_of_a_child

from forerun.cli import serve
from forerun.cli.serve_options import ServeOptions
from forerun.core.origin import Origin
from forerun.decoding.recipes import trie_of
from forerun.engine.engine import Engine
from forerun.models.text.prompts import vocabulary_of
from forerun.server.index_files import PASSAGE_CHARACTERS, check_files, passages
from forerun.trie import trie_file
from forerun.trie.autosave import AutoSaver
from forerun.trie.namespace import MIN_GROWTH_BYTES
from forerun.trie.trie import Trie, TrieConfig
from forerun.trie.trie_folder import Folder

ASKED: Json = {"model": "bundled", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}
OTHER: Json = ASKED | {"prompt": "Once upon a time"}


def text(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 5000, length).tolist()


def texts(trie: Trie, name: str) -> list[list[int]]:
    return [each.tolist() for each in trie.snapshot(name)[0]]


def warmed(trie: Trie | None = None, **seeds: list[int]) -> Trie:
    """A trie with texts in these namespaces."""
    trie = trie or Trie()
    for name, each in seeds.items():
        trie.warm(name, [text(seed) for seed in each])
    return trie


def within(trie: Trie, limit: int) -> bool:
    """Whether no array of any namespace could take more."""
    spaces = list(trie._shared.values())
    lengths = [sum(part.nbytes for part in space.index if part is not space.index.spelling) for space in spaces]
    return trie.kept <= sum(lengths) <= limit and trie._shared.granted <= limit


def test_all_namespaces_stay_under_the_limit_and_those_used_longest_ago_go():
    limit, trie = 10 * MIN_GROWTH_BYTES, Trie()
    trie.bound(limit, 1000)
    for number in range(60):
        trie.warm(f"{number}", [text(number)])
        trie.warm("first", [text(number, 20)])
        assert within(trie, limit)
    names = list(trie._shared)
    assert names == [*(f"{number}" for number in range(61 - len(names), 60)), "first"] and len(names) > 5
    for number in range(100):  # one that grows takes the room of all others
        trie.warm("59", [text(number, 100)])
        assert within(trie, limit)
    assert list(trie._shared) == ["59"]
    kept = texts(trie, "59")
    assert kept[-1] == text(99, 100) and 20 < len(kept) < 100  # the oldest outputs went, whole


def test_live_namespaces_stay_and_keep_to_the_limit_together():
    limit, trie = 4 * MIN_GROWTH_BYTES, Trie()
    trie.bound(limit, 1000)
    trie.warm("idle", [text(0)])
    for number in range(8):
        trie.begin(number, f"{number}", [1, 2, 3])
        for at in range(40):
            trie.extend(number, text(at, 100))
        assert within(trie, limit)
    assert list(trie._shared) == [f"{number}" for number in range(8)]
    for number in range(8):
        assert len(trie.retrieve(number, 8, 8)) == 4
        trie.finish(number)
    trie.warm("new", [text(1)])
    assert within(trie, limit) and texts(trie, "new") == [text(1)]
    minima = f"the limit is 5 bytes for 1 namespaces; the minima are {MIN_GROWTH_BYTES} and 1"
    with pytest.raises(ValueError, match=minima):
        Trie().bound(5, 1)


def test_an_index_that_grows_drafts_as_one_that_was_large_at_once():
    large, growing = Trie(), Trie()
    growing.bound(1 << 26, 100)
    for trie in (large, growing):
        trie.warm("a", [text(seed, 500) for seed in range(20)])
    twin = copy.deepcopy(growing)
    twin.warm("a", [text(seed, 500) for seed in range(20, 40)])
    assert twin.tokens("a") == 20_000 and texts(large, "a") == texts(growing, "a") == texts(twin, "a")[:20]
    for trie in (large, growing):
        trie.begin(0, "a", [1])
        trie.extend(0, text(3, 10))
    for one, other in zip(large.retrieve(0, 16, 16), growing.retrieve(0, 16, 16), strict=True):
        assert len(one) and one.tolist() == other.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "index", "v")
    yield made
    made.close()


def reopened(folder: Folder, vocabulary: str = "v") -> Folder:
    folder.close()
    return Folder(folder.path, vocabulary)


def contents(folder: Folder) -> dict[str, list[list[int]]]:
    again = reopened(folder)
    found = {name: list(map(np.ndarray.tolist, each)) for one in again.read() for name, each in one.namespaces.items()}
    again.close()
    return found


def stamps(folder: Folder) -> dict[str, tuple[int, int]]:
    found = {path.name: path.stat() for path in folder.path.glob("*.trie")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


def test_only_what_changed_is_written_and_what_is_gone_is_removed(folder):
    trie = warmed(Trie(TrieConfig(namespaces=3)), a=[1, 2], b=[3])
    trie.begin(0, "c", [1, 2, 3])  # nothing is written in it yet
    assert folder.save(trie) == 2
    before = stamps(folder)
    assert folder.save(trie) == 0 and stamps(folder) == before
    trie.extend(0, [7, 8])
    trie.extend(0, [])
    assert folder.save(warmed(trie, b=[4])) == 2 and len(stamps(folder).items() & before.items()) == 1
    assert folder.save(warmed(trie, d=[5])) == 1
    assert contents(folder) == {"b": [text(3), text(4)], "c": [[7, 8]], "d": [text(5)]}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.path.glob("*.trie")} == {0o600}


def test_what_was_read_is_written_again_only_after_a_change(folder):
    folder.save(warmed(a=[1], b=[2]))
    again, trie = reopened(folder), Trie()
    for content in again.read():
        for name, each in content.namespaces.items():
            trie.warm(name, each)
    again.holds(trie.changes())
    assert again.save(trie) == 0
    trie.withdraw("a")
    assert again.save(trie) == 1
    again.close()
    assert contents(folder) == {"b": [text(2)], "a": []}  # in the order of their last change


@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: data[:-9] + b"?" + data[-8:], lambda data: b""])
def test_a_damaged_file_is_set_aside_and_the_others_load(folder, harm, caplog):
    folder.save(warmed(a=[1], b=[2]))
    file = folder._file("a")
    file.write_bytes(harmed := harm(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert contents(folder) == {"b": [text(2)]}
    assert str(file) in caplog.text and f"renamed to {file.stem}.damaged" in caplog.text
    assert file.with_suffix(".damaged").read_bytes() == harmed and not file.exists()
    caplog.clear()
    assert contents(folder) == {"b": [text(2)]} and not caplog.text
    folder._file("b").rename(folder._file("c"))  # a file under another's name
    assert contents(folder) == {}


def test_a_folder_is_one_vocabularys_and_one_processs(folder):
    folder.save(warmed(a=[1]))
    with pytest.raises(ValueError, match="another process uses"):
        Folder(folder.path, "v")
    other = reopened(folder, "w")
    with pytest.raises(ValueError, match="has another vocabulary"):
        other.read()
    other.close()
    assert contents(folder) == {"a": [text(1)]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("moment", ["write", "fsync", "replace", "sync_folder"])
def test_a_process_killed_while_it_saves_leaves_a_whole_file(folder, moment, monkeypatch):
    trie = warmed(a=[1])
    folder.save(trie)
    warmed(trie, a=[2])

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(handle: int) -> None:
        os.truncate(handle, 100)
        die()

    places = {"write": (os, "fsync"), "replace": (Path, "replace"), "sync_folder": (trie_file, "sync_folder")}
    monkeypatch.setattr(*places.get(moment, (os, moment)), half if moment == "write" else die)
    assert status_of_a_child(lambda: folder.save(trie) > 0) == signal.SIGKILL
    monkeypatch.undo()
    done = moment == "sync_folder"
    assert len(list(folder.path.glob("*.tmp"))) == (not done)
    assert contents(folder) == {"a": [text(1), text(2)] if done else [text(1)]}
    assert not list(folder.path.glob("*.tmp"))


def test_a_keeper_saves_after_a_change_and_sleeps_while_there_is_none(folder):
    trie, go_on = Trie(), threading.Event()
    folder.save = save = Mock(wraps=folder.save)
    keeper = AutoSaver(trie, folder, 0.01)
    keeper.start()
    until(lambda: save.call_count == 1)  # at the start, in case files were learned from
    for count in (2, 3):
        warmed(trie, a=[count])
        until(lambda count=count: save.call_count == count)
        time.sleep(0.05)
        assert save.call_count == count and len(stamps(folder)) == 1
    save.side_effect = lambda store: go_on.wait(PATIENCE) and DEFAULT
    warmed(trie, a=[4])
    until(lambda: save.call_count == 4)
    warmed(trie, a=[5])  # nobody waits for a save that hangs
    go_on.set()
    keeper.close()
    assert contents(folder) == {"a": [text(2), text(3), text(4), text(5)]}


def test_a_save_that_fails_is_told_of_and_tried_again(folder, caplog):
    trie, full = Trie(), OSError(errno.ENOSPC, "No space left on device", "trie")
    folder.save = save = Mock(wraps=folder.save, side_effect=full)
    keeper = AutoSaver(trie, folder, 0.01)
    keeper.start()
    warmed(trie, a=[1])
    until(lambda: save.call_count >= 3)
    assert "No space left on device" in caplog.text and not stamps(folder)
    save.side_effect = None
    until(lambda: len(stamps(folder)) == 1)
    keeper.close()
    assert contents(folder) == {"a": [text(1)]}


def test_a_text_is_learned_in_whole_lines_and_json_line_by_line(tmp_path):
    plain, rows = tmp_path / "plain.txt", tmp_path / "rows.jsonl"
    lines = [f"line {number} of a long text\n" for number in range(2000)]
    plain.write_text("".join(lines))
    found = list(passages(plain))
    assert "".join(each.text for each in found) == "".join(lines) and len(found) > 2
    assert all(each.text.startswith(f"line {each.line - 1} ") for each in found)
    assert max(len(each.text) for each in found) <= PASSAGE_CHARACTERS
    long = "x" * (PASSAGE_CHARACTERS + 5)
    told = [{"text": "one"}, {"prompt": "?", "answer": "two", "namespace": "b"}, {"text": long, "drafted": []}]
    rows.write_text("\n\n".join(map(json.dumps, told)))
    assert [(each.text, each.namespace, each.line) for each in passages(rows)] == [
        ("one", "default", 1), ("two", "b", 3), ("x" * PASSAGE_CHARACTERS, "default", 5), ("xxxxx", "default", 5),
    ]  # fmt: skip
    check_files([plain, rows], 2)


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.txt", b"good\nbad \xff\n", r"a\.txt:2 is not UTF-8 text \(byte 4 of the line\)"),
    ("a.txt", b"", r"a\.txt has no text to index"),
    ("a.jsonl", b'{"text": "x"}\n{"text": }', r"a\.jsonl:2 is no JSON"),
    ("a.jsonl", b"[1]", r"a\.jsonl:1 .*: it is a list"),
    ("a.jsonl", b'\n{"prompt": "x"}', r"a\.jsonl:2 .*: the text is missing, empty, or no string"),
    ("a.jsonl", b'{"text": 1}', r"a\.jsonl:1 .*: the text is missing, empty, or no string"),
    ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1 .*surrogates not allowed"),
    ("a.jsonl", b'{"text": "x", "namespace": "a/b"}', r"a\.jsonl:1 .*: the namespace does not match"),
    ("a.jsonl", b'{"text": "x", "namespace": "a"}\n{"text": "x", "namespace": "b"}',
        r"a\.jsonl:2 has namespace 'b': a tenant may have 1 namespaces"),
])  # fmt: skip
def test_a_wrong_file_is_told_of_with_its_line_before_any_work(tmp_path, name, content, told, monkeypatch):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(serve, "build_engine", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setenv("FORERUN_NAMESPACES", "1")
    with pytest.raises(ValueError, match=told):
        serve.run(ServeOptions(warm=[tmp_path / name]))
    with pytest.raises(FileNotFoundError):
        serve.run(ServeOptions(warm=[tmp_path / "nothing"]))


@pytest.fixture
def engine() -> Engine:
    return bundled_engine(prefix_cache=1 << 26)


def accepted(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["forerun"]["accepted"])


def test_files_are_learned_by_every_tenant_and_not_again_after_a_restart(engine, tmp_path):
    answer = engine.generate(ASKED["prompt"], max_new_tokens=24, namespace="alone").texts[0]
    rows = ({"text": answer}, {"text": "x y", "namespace": "b"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told: Json = {"api_keys": ("k", "l"), "admin_key": "m", "warm": [tmp_path / "a.jsonl"], "index": tmp_path / "index"}
    kept = []
    for _ in range(2):
        one = bundled_engine()
        with LiveServer(one, **told) as server:
            trie = trie_of(one.level)
            assert len(trie.changes()) == 4
            kept.append({name: texts(trie, name) for name in trie.changes()})
            metrics = server.http.get("/metrics", headers={"authorization": "Bearer m"}).text
            assert f"forerun:index_bytes {float(trie.kept)}" in metrics and trie.kept > 0
            if len(kept) == 1:
                first = server.post(ASKED, headers={"authorization": "Bearer k"})
                assert text_of(first) == answer and accepted(first) > 12
    learned = [[*engine.tokenizer(answer, add_special_tokens=False)["input_ids"]]]
    asker = max(kept[1], key=lambda name: len(kept[1][name]))
    assert kept[1].pop(asker)[:1] == kept[0].pop(asker) == learned and kept[1] == kept[0]


def test_files_are_left_off_when_their_time_is_over(engine, tmp_path, serve, caplog):
    (tmp_path / "a.txt").write_text("a word " * 20_000)
    one = serve(engine, warm=[tmp_path / "a.txt"], warm_seconds=1e-6)
    said = f"{tmp_path / 'a.txt'}:1 and everything after it was not indexed: warm_seconds, 1e-06, are over"
    assert said in caplog.text
    assert one.http.get("/ready").status_code == 200


@pytest.mark.parametrize("share", [False, True])
def test_a_tenant_is_proposed_anothers_text_only_where_that_is_switched_on(engine, share, serve, monkeypatch):
    long = ASKED | {"prompt": "one two three four five six seven\n" * 60}  # longer than a chunk
    one = serve(engine, api_keys=("key-of-a", "key-of-b"), share=share)
    trie, origins = trie_of(engine.level), []
    step = trie.step

    def watched(*given: Any) -> Any:
        drafts = step(*given)
        for draft in drafts:
            origins.extend(draft.origins.tolist())
        return drafts

    monkeypatch.setattr(trie, "step", watched)
    told = [{"authorization": f"Bearer key-of-{name}"} for name in "ab"]
    for each in told:  # what steps cost is learned first, and by all
        one.post(ASKED | {"prompt": "zero, zero, zero,", "forerun": {"drafter": "none"}}, headers=each)
    for asked in (ASKED, long):
        first = one.post(asked, headers=told[0])
        origins.clear()
        hits = engine.prefixes.hits
        second = one.post(asked, headers=told[1])
        assert text_of(first) == text_of(second)
        assert engine.prefixes.hits == hits  # what prompts begin with is shared with nobody
        if asked is ASKED:
            assert (Origin.EARLIER in origins) == share and origins
            assert share or accepted(second) <= accepted(first)
    names = set(trie.changes())
    assert (names == {"shared/default"}) == share and (len(names) == 2) == (not share)


def test_a_server_refuses_what_it_cannot_keep(engine, tmp_path):
    folder = Folder(tmp_path, "other")
    folder.save(warmed(a=[1]))
    folder.close()
    for _ in range(2):  # the folder is free again after the error
        with pytest.raises(ValueError, match="has another vocabulary"):
            LiveServer(engine, index=tmp_path)
    (tmp_path / "a.txt").write_text("x")
    plain = Engine(engine.target.model, "lookup", tokenizer=engine.tokenizer)
    for told in ({"index": tmp_path}, {"warm": [tmp_path / "a.txt"]}):
        with pytest.raises(ValueError, match="index and warm are for drafters with a trie, and drafter is 'lookup'"):
            LiveServer(plain, drafter="lookup", **told)


def test_the_fingerprint_is_of_tokens_and_their_ids():
    tokenizer, changed = bundled()[1], bundled()[1]
    assert vocabulary_of(changed) == vocabulary_of(tokenizer)
    changed.add_tokens(["never seen"])
    assert vocabulary_of(changed) != vocabulary_of(tokenizer)


@pytest.mark.parametrize("name", ["trie", "auto", "triforce-trie"])
def test_drafters_with_a_trie_show_it(name):
    assert isinstance(trie_of(Engine(bundled()[0], name).level), Trie)


@pytest.mark.matrix
def test_a_server_goes_on_with_what_it_learned_and_keeps_it_when_it_is_killed(engine, tmp_path, serve):
    first = LiveServer(engine, index=tmp_path)
    cold = first.post(ASKED)
    first.close()
    with free_socket() as one:
        port = one.getsockname()[1]
    given = ("--port", port, "--kv-memory", "1GiB", "--index", tmp_path, "--index-interval", 0.05)
    with start("serve", "--drafter", "trie", *given) as served:
        until(lambda: served.poll() is not None or ready(port))
        url = f"http://127.0.0.1:{port}/v1/completions"
        warm, other = (httpx.post(url, json=asked, timeout=PATIENCE) for asked in (ASKED, OTHER))
        whole = [each.json()["usage"]["completion_tokens"] for each in (cold, warm, other)]
        until(lambda: lengths(tmp_path, engine) == whole)
    assert served.returncode == -signal.SIGKILL
    assert text_of(warm) == text_of(cold) and accepted(warm) > accepted(cold) + 4
    again = serve(bundled_engine(), index=tmp_path).post(OTHER)
    assert text_of(again) == text_of(other) and accepted(again) > accepted(other) + 4


def lengths(folder: Path, engine: Engine) -> list[int]:
    """Of the outputs in the only file, which may be replaced at any time."""
    (file,) = folder.glob("*.trie")
    content = trie_file.read(file)
    assert content.vocabulary == vocabulary_of(engine.tokenizer)
    return [len(each) for each in content.namespaces["default/default"]]


def test_who_fills_the_index_pushes_out_nothing_of_others():
    trie = Trie()
    trie.bound(1 << 26, 4, 2)
    for name in ("a/one", "b/one", "b/two", "b/three"):
        trie.warm(name, [np.arange(50)])
    assert list(trie.changes()) == ["a/one", "b/two", "b/three"]  # b's oldest made room for its newest
    for name in ("c/one", "d/one"):
        trie.warm(name, [np.arange(50)])
    assert list(trie.changes()) == ["a/one", "b/three", "c/one", "d/one"]
    for name in ("one", "two", "three"):
        trie.warm(name, [np.arange(50)])  # without a tenant: all of one owner
    assert {"a/one", "c/one", "d/one"} > set(trie.changes()) - {"two", "three"}


def test_a_file_that_cannot_be_written_keeps_no_other_from_it(folder, monkeypatch):
    trie, full = warmed(large=[1], small=[1]), OSError(errno.ENOSPC, "no space is left")
    monkeypatch.setattr(trie_file, "write", Mock(wraps=trie_file.write, side_effect=[full, DEFAULT, DEFAULT]))
    with pytest.raises(OSError, match="no space is left"):
        folder.save(trie)
    assert trie_file.write.call_count == 2 and len(stamps(folder)) == 1
    assert folder.save(trie) == 1 and len(stamps(folder)) == 2
