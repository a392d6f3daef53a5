"""The functions that are called at every step. They take addresses of pins, not arrays, which is faster."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.trie import best_first, learning, multibranch
from forerun.trie import text_cursor as place_module
from forerun.trie.array_handles import reader
from forerun.trie.arrays import Index
from forerun.trie.draft_workspace import Draft, DraftWorkspace
from forerun.trie.logistic_mixer import untrained
from forerun.trie.text_cursor import TextCursor

index_at = reader(Index.allocate(0, 0, 0))
place_at = reader(TextCursor.start())
mixer_at = reader(untrained())
desk_at = reader(DraftWorkspace.allocate(1))

_grow, _retrieve, _extend, _skip = best_first.grow, multibranch.retrieve, learning.extend, place_module.skip


@compiled
def grow(own: int, shared: int, place: int, mixer: int, desk: int, draft: Draft, deepest: int) -> int:
    """See ``bestfirst.grow``."""
    return _grow(index_at(own), index_at(shared), place_at(place), mixer_at(mixer), desk_at(desk), draft, deepest)


@compiled
def retrieve(
    own: int,
    shared: int,
    place: int,
    desk: int,
    draft: Draft,
    weight: float,
    longest: int,
    enough: int,
    max_depth: int,
    branch_length: int,
    single: bool,
) -> int:
    """See ``multibranch.retrieve``."""
    texts = (index_at(own), index_at(shared), place_at(place))
    return _retrieve(*texts, weight, desk_at(desk), draft, longest, enough, max_depth, branch_length, single)


@compiled
def extend(own: int, shared: int, place: int, mixer: int, desk: int, tokens: IntArray, rate: float) -> int:
    """See ``learning.extend``."""
    return _extend(index_at(own), index_at(shared), place_at(place), mixer_at(mixer), desk_at(desk), tokens, rate)


@compiled
def skip(own: int, shared: int, place: int, aside: int, tokens: IntArray) -> None:
    """See ``place.skip``."""
    _skip(index_at(own), index_at(shared), place_at(place), place_at(aside), tokens)
