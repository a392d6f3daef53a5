"""The index of a server: how much memory it may take, what it starts with, and how it outlives the server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from forerun.drafting.recipes import trie_of
from forerun.engine.engine import Engine
from forerun.models.text.vocabulary import fingerprint
from forerun.server.filling import fill
from forerun.server.keys import Namespaces
from forerun.server.settings import ServerSettings
from forerun.trie.autosave import AutoSaver
from forerun.trie.trie import Trie
from forerun.trie.trie_folder import Folder

NAMESPACES = 256
"""Namespaces of all tenants together. Each reserves 64 MiB of addresses, of which it takes what its texts need."""


def keep(engine: Engine, told: ServerSettings, namespaces: Namespaces, tenants: Sequence[str]) -> AutoSaver | None:
    """Bound an engine's index, fill it from its folder and from files, and keep it from ``AutoSaver.start`` on.

    Args:
        engine: that serves; it has a tokenizer.
        told: the settings.
        namespaces: of all tenants.
        tenants: who learn from the files, all of them.

    Returns:
        What keeps the index, if there is a folder for it.

    Raises:
        ValueError: if there is a folder or a file, but no index; or for a wrong folder or file.
        OSError: if one of them cannot be read.
    """

    def places(name: str) -> list[str]:
        for tenant in tenants:
            namespaces.take(tenant, name)
        return list(dict.fromkeys(namespaces.learning(tenant, name) for tenant in tenants))

    def encode(text: str) -> list[int]:
        assert tokenizer is not None
        return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    trie, tokenizer = _trie(engine, told), engine.tokenizer
    if trie is None:
        return None
    trie.bound(int(told.index_limit), NAMESPACES)
    if told.index is None:
        fill(trie, encode, [], told.warm, places, told.warm_seconds)
        return None
    folder = Folder(told.index, fingerprint(tokenizer))
    try:
        kept = folder.read()
        for place in chain.from_iterable(content.namespaces for content in kept):
            namespaces.known(place, tenants)
        fresh = fill(trie, encode, kept, told.warm, places, told.warm_seconds)
    except BaseException:
        folder.close()
        raise
    folder.holds({name: number for name, number in trie.changes().items() if name not in fresh})
    return AutoSaver(trie, folder, told.index_interval)


def _trie(engine: Engine, told: ServerSettings) -> Trie | None:
    try:
        return trie_of(engine.drafter)
    except ValueError as error:
        if told.index is None and not told.warm:
            return None
        raise ValueError(f"index and warm are for drafters with a trie, and drafter is {told.drafter!r}") from error
