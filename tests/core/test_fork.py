"""A process that was forked has tries of its own, and cannot write into a text that is shared."""

import os

import pytest
import torch
from support.processes import status_of_a_child

from forerun.kv.full_cache import FullCache
from forerun.trie.trie import Trie

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_what_a_forked_process_learns_stays_with_it():
    trie = Trie()  # so large that its arrays are mapped
    trie.warm("", [[1, 2, 3, 4]] * 3)
    trie.begin(0, "", [1, 2])
    before = trie.retrieve(0, 8, 8)

    def learn() -> bool:
        trie.warm("", [[1, 2, 9, 9, 9]] * 50)
        return trie.tokens("") == 12 + 250

    assert status_of_a_child(learn) == 0
    after = trie.retrieve(0, 8, 8)
    assert [part.tolist() for part in before] == [part.tolist() for part in after]
    assert trie.tokens("") == 12


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files without names on this system")
def test_a_forked_process_cannot_write_into_a_text():
    cache = FullCache(100, shareable=True)
    store = cache.reserve(range(2), torch.zeros(1, 2, 1, 8), 1)
    assert cache._shared is not None
    store.fill_(1.0)

    def write() -> bool:
        store.fill_(2.0)
        return True

    assert os.WIFSIGNALED(status_of_a_child(write))  # it was not let in
    assert bool((store == 1.0).all())
