"""A process that was forked has tries of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
from forerun.trie.trie import Trie

trie = Trie()  # so large that its arrays are mapped
trie.warm("", [[1, 2, 3, 4]] * 3)
trie.begin(0, "", [1, 2])
before = trie.retrieve(0, 8, 8)
child = os.fork()
if child == 0:
    trie.warm("", [[1, 2, 9, 9, 9]] * 50)
    os._exit(trie.tokens("") != 12 + 250)
assert os.waitpid(child, 0)[1] == 0
after = trie.retrieve(0, 8, 8)
assert [part.tolist() for part in before] == [part.tolist() for part in after], (before, after)
assert trie.tokens("") == 12, trie.tokens("")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_what_a_forked_process_learns_stays_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WRITTEN = """
import os
import torch
from forerun.kv.full_cache import FullCache

cache = FullCache(100, shareable=True)
store = cache.reserve(range(2), torch.zeros(1, 2, 1, 8), 1)
assert cache._shared is not None
store.fill_(1.0)
child = os.fork()
if child == 0:
    store.fill_(2.0)
    os._exit(0)
assert os.WIFSIGNALED(os.waitpid(child, 0)[1])  # it was not let in
assert bool((store == 1.0).all())
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files without names on this system")
def test_a_forked_process_cannot_write_into_a_text() -> None:
    done = subprocess.run([sys.executable, "-c", WRITTEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
