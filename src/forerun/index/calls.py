"""The functions that are called at every step. They take addresses of pins, not arrays, which is faster."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.index import bestfirst, learning, multibranch
from forerun.index import place as place_module
from forerun.index.arrays import Index
from forerun.index.desk import Desk, Draft
from forerun.index.mixing import untrained
from forerun.index.pinned import reader
from forerun.index.place import Place

index_at = reader(Index.allocate(0, 0, 0))
place_at = reader(Place.start())
mixer_at = reader(untrained())
desk_at = reader(Desk.allocate(1))

_grow, _retrieve, _extend, _skip = bestfirst.grow, multibranch.retrieve, learning.extend, place_module.skip


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
