"""Texts on disk: read once by whichever process, bit for bit as if read anew, and never another model's or tenant's."""

import copy
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from support.batches import CHUNK, LONG, Reads, ask, finish, finish_all, prompt
from support.tiny import tiny

import forerun
from forerun.engine import kv_store, prefix_sharing
from forerun.engine.engine import Engine
from forerun.engine.kv_store import KV_FILE_SUFFIX, UNFINISHED_SUFFIX, DiskLRU
from forerun.kv import kv_file
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_file import DamagedFileError, KVFile
from forerun.kv.low_rank import LowRankCache, ShortKeys

BOOK, QUESTION, NEW = 90, 5, 6
"""Tokens of a prompt's beginning, of what follows it, and of an answer."""
HELD = 88
"""Tokens of the beginning in whole chunks."""


@pytest.fixture(autouse=True)
def short_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MIN_STORED_TOKENS", CHUNK)


def engine(folder: Path | None, drafter: str = "none", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    model = copy.deepcopy(options.pop("model")).to(dtype) if "model" in options else tiny("llama", dtype)
    return Engine(model, drafter, settings=LONG, prune_drafts=False, prefill_block=CHUNK, kv_store=folder, **options)


def question(number: int) -> list[int]:
    return [*prompt(BOOK), *prompt(QUESTION, 100 + number)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{KV_FILE_SUFFIX}"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter", ["none", "trie", "low-rank", "triforce-trie"])
def test_a_text_is_read_once_and_says_the_same(tmp_path, drafter, dtype):
    """By one engine, and by another one that knows only the folder."""
    alone = engine(None, "none", dtype)
    wanted = [alone.generate([question(n)], max_new_tokens=NEW).generated[0] for n in range(3)]
    first, second = engine(tmp_path, drafter, dtype), None
    assert ask(first, question(0)) == (wanted[0], 0)
    assert ask(first, question(1)) == (wanted[1], HELD)
    second = engine(tmp_path, drafter, dtype)
    reads = Reads(second.target)
    assert ask(second, question(2)) == (wanted[2], HELD)
    assert sum(reads.passes[0]) <= CHUNK
    assert ask(second, question(0))[0] == wanted[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "gemma2", "mixtral"])
def test_texts_of_other_architectures(tmp_path, architecture):
    model = tiny(architecture)
    wanted, _ = ask(engine(None, model=model, dtype=torch.float64), question(0))
    ask(engine(tmp_path, model=model, dtype=torch.float64), question(1))
    assert ask(engine(tmp_path, model=model, dtype=torch.float64), question(0)) == (wanted, HELD)


ELSEWHERE = """
import sys, json
from support.batches import ask
from kv.test_store import engine, question
from forerun.engine import kv_store
import torch
torch.set_num_threads(1)
kv_store.MIN_STORED_TOKENS = 8
print(json.dumps(ask(engine(sys.argv[1]), question(0))))
"""


@pytest.mark.matrix
def test_another_process_finds_what_this_one_read(tmp_path):
    one = engine(tmp_path)
    wanted, _ = ask(one, question(0))
    one.close()
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(forerun.__file__).parents[1])])
    command, env = [sys.executable, "-c", ELSEWHERE, str(tmp_path)], {"PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    found = subprocess.run(command, env=os.environ | env, stdout=subprocess.PIPE, check=True, timeout=120)
    assert json.loads(found.stdout.splitlines()[-1]) == [wanted, HELD]


def test_a_namespace_finds_its_own_texts_only_and_no_name_tells_it(tmp_path):
    one = engine(tmp_path)
    ask(one, question(0), "tenant-secret")
    assert ask(one, question(0), "other")[1] == 0
    assert ask(one, question(1), "tenant-secret")[1] == HELD
    assert ask(engine(tmp_path), question(0), "third")[1] == 0
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert len({path.parent for path in files(tmp_path)}) == 3
    assert not any("secret" in name or "other" in name for name in names)
    assert not any(b"secret" in path.read_bytes() for path in files(tmp_path))
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}


@pytest.mark.parametrize("change", ["weight", "config", "type", "sources"])
def test_another_model_type_or_other_sources_find_nothing(tmp_path, monkeypatch, change):
    ask(engine(tmp_path), question(0))
    assert ask(engine(tmp_path), question(0))[1] == HELD
    model = copy.deepcopy(tiny("llama", torch.float32))
    if change == "weight":
        model.model.embed_tokens.weight.data[40, 3] += 1e-3
    elif change == "config":
        model.config.rms_norm_eps *= 2
    elif change == "sources":
        monkeypatch.setattr("forerun.models.forward.fingerprint.sources", lambda folder: "changed")
    dtype = torch.bfloat16 if change == "type" else torch.float32
    assert ask(engine(tmp_path, model=model, dtype=dtype), question(0))[1] == 0


class Adapted(torch.nn.Linear):
    """A module with a state that is no weight."""

    active = "a"


def flip(path: Path, first: bool = False) -> None:
    """Change a byte that was written: the header's, or one of the last run's."""
    file = KVFile(path)
    place = 40 if first else file._first + [run for run in file._runs if run[1]][-1][0] + 5
    with path.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 0x10]))


DAMAGES = {
    "data": flip, "header": lambda path: flip(path, first=True),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "empty": lambda path: os.truncate(path, 0), "noise": lambda path: path.write_bytes(b"\xff" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_text_is_removed_and_read_again(tmp_path, damage, caplog):
    wanted, _ = ask(engine(tmp_path), question(0))
    (path,) = files(tmp_path)
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert ask(engine(tmp_path), question(0)) == (wanted, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    assert ask(engine(tmp_path), question(0)) == (wanted, HELD)


def test_the_limit_holds_and_what_was_used_least_recently_goes(tmp_path):
    texts = [prompt(BOOK, n) for n in range(3)]
    ask(engine(tmp_path), texts[0])
    taken = 2 * DiskLRU(tmp_path, 1 << 30).nbytes
    one = engine(tmp_path, kv_store_limit=taken)
    ask(one, texts[1])
    assert len(files(tmp_path)) == 2
    for path in files(tmp_path):
        os.utime(path, (1, 1))
    assert ask(one, texts[0])[1] == HELD
    ask(one, texts[2])
    assert one.store.nbytes == taken
    assert [ask(engine(tmp_path), text)[1] for text in texts[::2]] == [HELD, HELD]
    assert ask(engine(tmp_path, kv_store_limit=taken), texts[1])[1] == 0


def test_a_text_larger_than_the_limit_is_not_kept(tmp_path, caplog):
    one = engine(tmp_path, kv_store_limit=100)
    with caplog.at_level(logging.WARNING, "forerun"):
        ask(one, question(0))
    assert files(tmp_path) == [] and "is not stored" in caplog.text


def test_a_text_takes_the_place_of_its_beginning_if_it_is_an_eighth_longer(tmp_path):
    one = engine(tmp_path)
    long = prompt(120)
    sizes = []
    for count in (81, 85, 90, 115):
        ask(one, long[:count])
        sizes.append([KVFile(path).metadata["length"] for path in files(tmp_path)])
    assert sizes == [["80"], ["80"], ["80"], ["112"]]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What writers of files wait for."""
    go, put = threading.Event(), DiskLRU.put
    monkeypatch.setattr(DiskLRU, "put", lambda self, *metadata: go.wait(60) and put(self, *metadata))
    return go


def test_a_text_is_found_while_it_is_being_written(tmp_path, go):
    wanted, _ = ask(engine(None), question(1))
    one = engine(tmp_path)
    finish_all(one, one.requests([question(0)], max_new_tokens=NEW))
    (request,) = one.requests([question(1)], max_new_tokens=NEW)
    finish_all(one, [request])
    assert (request.generated.tolist(), one.prefixes.hits) == (wanted, HELD)
    assert files(tmp_path) == []
    go.set()
    one.flush()
    assert ask(engine(tmp_path), question(1))[1] == HELD


def test_more_than_may_wait_is_not_kept_and_nobody_waits(tmp_path, monkeypatch, go):
    monkeypatch.setattr(kv_store, "MAX_PENDING_FILES", 1)
    one = engine(tmp_path)
    for number in range(3):
        finish_all(one, one.requests([prompt(BOOK, number)], max_new_tokens=NEW))
    go.set()
    one.close()
    assert len(files(tmp_path)) == 1
    ask(one, prompt(BOOK, 9))  # after the end it still answers
    assert len(files(tmp_path)) == 1


def test_a_full_disk_costs_nothing_but_the_keeping(tmp_path, monkeypatch, caplog):
    wanted, _ = ask(engine(None), question(0))
    one = engine(tmp_path)
    monkeypatch.setattr(kv_file.os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with caplog.at_level(logging.WARNING, "forerun"):
        assert ask(one, question(0)) == (wanted, 0)
    assert "cannot store a prefix" in caplog.text and "No space" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []
    monkeypatch.undo()


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of texts for which indexes were made, one for each layer."""
    made, of = list[int](), ShortKeys.of
    monkeypatch.setattr(ShortKeys, "of", lambda keys, *metadata: made.append(keys.shape[1]) or of(keys, *metadata))
    return made


def test_the_index_of_a_text_is_made_once(tmp_path, indexed):
    wanted = [ask(engine(None), question(n))[0] for n in range(2)]
    assert ask(engine(tmp_path, "low-rank"), question(0))[0] == wanted[0]
    assert len(indexed) == 2 and len(files(tmp_path)) == 2  # the text and its index
    later = engine(tmp_path, "low-rank")
    (request,) = later.requests([question(1)], max_new_tokens=NEW)
    finish_all(later, [request])
    assert len(indexed) == 2
    assert request.generated.tolist() == wanted[1] and sum(request.stats.drafted)
    flip(files(tmp_path)[0])
    assert ask(engine(tmp_path, "low-rank"), question(1)) == (wanted[1], HELD)
    assert len(indexed) == 4


def test_the_index_of_a_text_in_memory_is_made_once(indexed):
    one = engine(None, "low-rank", prefix_cache=1 << 24)
    wanted = [(ask(engine(None), question(n))[0], HELD * (n > 0)) for n in range(3)]
    assert ask(one, question(0)) == wanted[0]
    bare = HELD * FullCache(1).needs(one.target.kv, 1)
    assert one.prefixes.nbytes > bare  # the index counts
    assert [ask(one, question(n)) for n in (1, 2)] == wanted[1:]
    assert len(indexed) == 2
    one.prefixes.limit = bare
    assert ask(one, question(0))[0] == wanted[0][0]
    assert not len(one.prefixes)  # what goes beyond the limit with its index goes


def test_a_folder_that_cannot_be_looked_into_harms_no_request(tmp_path, monkeypatch, caplog):
    wanted = [ask(engine(None), question(n))[0] for n in range(2)]
    one = engine(tmp_path)
    monkeypatch.setattr(DiskLRU, "names", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
    assert ask(one, question(0)) == (wanted[0], 0)
    leader, follower = (one.requests([question(n)], max_new_tokens=NEW)[0] for n in range(2))
    with one.batch() as batch:
        batch.admit(leader)
        batch.admit(follower)
        batch.step()
        batch.cancel(leader)
        finish(batch)
    assert follower.generated.tolist() == wanted[1]
    assert "too many open files" in caplog.text


def test_texts_may_come_and_go_while_one_looks(tmp_path, monkeypatch):
    one = engine(tmp_path)
    kept = one.store
    names = [f"space/{number}" for number in range(2000)]
    kept._texts.update({name: [b"key"] for name in names})
    monkeypatch.setattr(DiskLRU, "names", lambda files, within: names)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            kept._texts["space/new"] = [b"key"]
            kept._texts.pop("space/new", None)

    thread, before = threading.Thread(target=change), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(50):
            assert set(kept._stored_keys("space")) == set(names)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


def test_an_index_is_kept_beside_a_text_as_far_as_both_are_the_same(tmp_path, monkeypatch):
    made: list[int] = []
    of_text = LowRankCache.saved_state
    monkeypatch.setattr(LowRankCache, "saved_state", lambda view, length: made.append(length) or of_text(view, length))
    ask(engine(tmp_path), question(0))
    shared = HELD - CHUNK
    other = [*question(0)[: shared + 1], *prompt(BOOK + QUESTION - shared - 1, 77)]
    wanted = ask(engine(None), other)[0]
    assert ask(engine(tmp_path, "low-rank"), other) == (wanted, shared)
    assert made == [shared]


def test_texts_in_memory_are_no_more_than_half_of_the_files_that_may_be_open(monkeypatch):
    monkeypatch.setattr(prefix_sharing, "_files", lambda: 2)
    one = engine(None, prefix_cache=1 << 24)
    texts = [[*prompt(BOOK, 50 + n), *prompt(QUESTION)] for n in range(4)]
    for text in texts:
        ask(one, text)
    assert len(one.prefixes) == 2
    assert [ask(one, text)[1] for text in reversed(texts)] == [HELD, HELD, 0, 0]


def test_an_index_that_was_kept_is_the_one_that_was_made():
    generator = torch.Generator().manual_seed(1)
    keys, queries = (torch.randn(2, 700, 16, generator=generator) for _ in range(2))
    index = ShortKeys.of(keys, queries[:, :5], 8)

    def of(keys: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        return lambda first, last: keys[:, first:last]

    index.extend(of(keys), 640)
    kept = index.tensors(600)
    before = {name: t.clone() for name, t in kept.items()}
    again = ShortKeys.of_tensors(kept, 400)
    assert again.known == 256  # whole groups
    again.extend(of(keys), 688)
    index.extend(of(keys), 688)
    assert torch.equal(again.worth(queries[:, :3]), index.worth(queries[:, :3]))
    other = ShortKeys.of_tensors(kept, 600)
    other.extend(of(-keys), 688)
    assert all(torch.equal(t, before[name]) for name, t in kept.items())  # a text that goes on changes nothing in it
    for one in (index, ShortKeys.of_tensors(kept, 600)):  # nor one that knows less at first, or was cut
        for length in (464, 496):
            one.extend(of(-keys), length)
        assert all(torch.equal(t, before[name]) for name, t in kept.items())


def test_safetensors_reads_a_text(tmp_path):
    cache = FullCache()
    rows = {i: (torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 4)) for i in range(2)}
    cache.extend(rows)
    with (tmp_path / "text").open("w+b") as file:
        kv_file.write(file.fileno(), kv_file.text_areas(rows, 700), {"length": "300"})
    with safe_open(tmp_path / "text", "pt") as found:
        assert torch.equal(found.get_tensor("1.values")[:, :, :300], rows[1][1])
    assert (tmp_path / "text").stat().st_blocks * 512 < 2 * sum(t.nbytes for both in rows.values() for t in both)
    beginning = KVFile(tmp_path / "text").prefix(300, lambda part: None)
    for capacity in (0, 700, 5000):  # the last one has more than the file
        begun = FullCache(capacity)
        begun.begin_with(beginning, 290)
        more = {i: tuple(torch.randn(1, 2, 1000, t.shape[3]) for t in both) for i, both in rows.items()}
        begun.extend(more)
        for i, both in rows.items():
            for new, old, after in zip(begun.read(i, 0, 1290), both, more[i], strict=True):
                assert torch.equal(new, torch.cat((old[:, :, :290], after), 2))
    KVFile(tmp_path / "text").verify()


def test_a_header_that_was_made_up_is_refused(tmp_path):
    with (tmp_path / "text").open("w+b") as file:
        kv_file.write(file.fileno(), kv_file.tensor_areas({"a": torch.arange(9)}), {"keys": "00"})
    assert torch.equal(KVFile(tmp_path / "text").tensors()["a"], torch.arange(9))
    data = (tmp_path / "text").read_bytes()
    (tmp_path / "text").write_bytes(data.replace(b'"keys": "00"', b'"keys": "01"'))
    with pytest.raises(DamagedFileError, match="checksum"):
        KVFile(tmp_path / "text")


FORK = multiprocessing.get_context("fork")


def test_a_writer_that_is_killed_leaves_nothing(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    flock = fcntl.flock

    def as_nfs(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "NFS locks only what is open for writing")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs)

    def write(file: int) -> None:
        os.write(file, b"half")
        os.write(writing, b"!")
        signal.pause()

    child = FORK.Process(target=lambda: DiskLRU(tmp_path, 1 << 20).put(f"a/b{KV_FILE_SUFFIX}", 9, write))
    child.start()
    assert os.read(reading, 1) == b"!"
    living = DiskLRU(tmp_path, 1 << 20)  # while it writes, others leave it alone
    assert len(list(tmp_path.rglob(f"*{UNFINISHED_SUFFIX}"))) == 1
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert living.names("a") == [] and len(list(tmp_path.rglob(f"*{UNFINISHED_SUFFIX}"))) == 1
    living.put(f"a/c{KV_FILE_SUFFIX}", 9, lambda file: None)
    assert list(tmp_path.rglob(f"*{UNFINISHED_SUFFIX}")) == []
    assert living.names("a") == [f"a/c{KV_FILE_SUFFIX}"]


def test_processes_that_share_a_folder_never_see_half_a_file(tmp_path):
    """Each writes and reads the same few names, under a limit that lets some of them go."""

    def work(seed: int) -> None:
        files = DiskLRU(tmp_path, 90_000)
        for turn in range(25):
            name = f"a/{(turn * (seed + 1)) % 5}{KV_FILE_SUFFIX}"
            areas = kv_file.tensor_areas({"t": torch.full((2000,), float(turn % 5))})
            files.put(name, 16_000, lambda file, areas=areas: kv_file.write(file, areas, {}))
            for each in files.names("a"):
                try:
                    file = KVFile(tmp_path / each)
                except FileNotFoundError:
                    continue
                file.verify()
        assert files.nbytes <= 90_000 + 2 * 20_480  # what the others write just now

    children = [FORK.Process(target=work, args=(seed,)) for seed in range(3)]
    for child in children:
        child.start()
    assert [child.join() or child.exitcode for child in children] == [0, 0, 0]
    assert 0 < DiskLRU(tmp_path, 90_000).nbytes <= 90_000
    assert list(tmp_path.rglob(f"*{UNFINISHED_SUFFIX}")) == []


def put(files: DiskLRU, name: str, size: int = 8000) -> None:
    areas = kv_file.tensor_areas({"t": torch.zeros(size // 4)})
    assert files.put(f"{name}{KV_FILE_SUFFIX}", size, lambda file: kv_file.write(file, areas, {}))


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(KV_FILE_SUFFIX) for path in files(folder))


def test_what_was_used_last_stays_whatever_the_clock_says(tmp_path, monkeypatch):
    one = DiskLRU(tmp_path, 30_000)  # room for two: each takes 12 KiB
    put(one, "a/first")
    monkeypatch.setattr(kv_store.time, "time_ns", lambda: 1)  # the clock was set back
    put(DiskLRU(tmp_path, 30_000), "a/second")
    put(DiskLRU(tmp_path, 30_000), "a/third")
    assert names(tmp_path) == ["second", "third"]


def test_one_tenants_texts_push_out_no_others(tmp_path):
    one = DiskLRU(tmp_path, 60_000)
    for name in ("m/of-a/x/1", "m/of-b/x/2", "m/of-b/y/3", "m/of-b/z/4", "m/of-b/z/5"):
        put(one, name)
    assert names(tmp_path) == ["1", "3", "4", "5"]  # the oldest is a's, but b has the most


def test_what_was_not_used_for_long_goes(tmp_path):
    one = DiskLRU(tmp_path, 1 << 20, expiry=100)
    put(one, "a/old")
    put(one, "a/new")
    os.utime(tmp_path / f"a/old{KV_FILE_SUFFIX}", (time.time() - 101,) * 2)
    assert one.names("a") == [f"a/new{KV_FILE_SUFFIX}"] and names(tmp_path) == ["new"]
    with pytest.raises(ValueError, match="above 0"):
        engine(tmp_path, kv_store_expiry=0.0)


def test_with_a_key_nothing_is_used_that_was_written_without_it(tmp_path):
    one = engine(tmp_path, kv_store_key=b"secret")
    wanted, _ = ask(one, question(0))
    assert ask(engine(tmp_path, kv_store_key=b"secret"), question(0)) == (wanted, HELD)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    file = KVFile(path, b"secret")
    with path.open("r+b") as written:  # a byte of the data, with everything else as it was
        written.seek(file._first)
        written.write(bytes([whole[file._first] ^ 1]))
    with pytest.raises(DamagedFileError):
        file.verify()
    path.write_bytes(whole)
    for key in (None, b"other"):
        with pytest.raises(DamagedFileError):
            KVFile(path, key)
        assert ask(engine(tmp_path, kv_store_key=key), question(0)) == (wanted, 0)
        for each in files(tmp_path):
            each.unlink()
        path.write_bytes(whole)


def test_a_file_is_verified_once_and_not_at_admission_if_it_was_before(tmp_path, monkeypatch):
    ask(engine(tmp_path), question(0))
    one = engine(tmp_path)
    (request,) = one.requests([question(1)], max_new_tokens=NEW)
    verified, verify = list[Path](), KVFile.verify
    monkeypatch.setattr(KVFile, "verify", lambda file: (verified.append(file._path), verify(file)))
    with one.batch() as batch:
        batch.verify_stored(request)  # a server does so before it takes the scheduler's lock
        assert len(verified) == 1
        batch.admit(request)
    assert request.cached_tokens == HELD
    for number in range(2, 4):
        assert ask(one, question(number))[1] == HELD
    assert len(verified) == 1


def test_what_cannot_be_kept_is_refused_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="limit is -1 bytes"):
        engine(tmp_path / "a", kv_store_limit=-1)
    with pytest.raises(ValueError, match="kv_store_limit is set, and there is no kv_store"):
        engine(None, kv_store_limit=5)
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        engine(tmp_path / "a", model=model)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        engine(tmp_path / "file")
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[0].self_attn.q_proj.__class__ = Adapted
    with pytest.raises(ValueError, match="Adapted, whose code and state are not checked"):
        engine(tmp_path, model=model)
    monkeypatch.setattr(kv_store, "fcntl", None)
    with pytest.raises(NotImplementedError, match="kv_store needs locks on files"):
        DiskLRU(tmp_path / "store", 1 << 20)
