"""The functions that are called at every step. They take addresses of handles, not arrays, which is faster."""

from __future__ import annotations

from forerun.core.compiling import compiled
from forerun.core.tree import IntArray
from forerun.trie import best_first, learning, recycled, text_cursor
from forerun.trie.array_handles import reader
from forerun.trie.arrays import Index, Int32Array
from forerun.trie.draft_workspace import Draft, DraftWorkspace
from forerun.trie.logistic_mixer import untrained
from forerun.trie.recycled import Float32Array
from forerun.trie.text_cursor import TextCursor

index_at = reader(Index.allocate(0, 0, 0))
cursor_at = reader(TextCursor.start())
mixer_at = reader(untrained())
workspace_at = reader(DraftWorkspace.allocate(1))

_grow, _extend, _peek, _keep = best_first.grow, learning.extend, text_cursor.peek, recycled.keep


@compiled
def grow(own: int, shared: int, cursor: int, mixer: int, workspace: int, draft: Draft, deepest: int) -> int:
    """See ``best_first.grow``."""
    return _grow(
        index_at(own), index_at(shared), cursor_at(cursor), mixer_at(mixer), workspace_at(workspace), draft, deepest
    )


@compiled
def extend(own: int, shared: int, cursor: int, mixer: int, workspace: int, tokens: IntArray, rate: float) -> int:
    """See ``learning.extend``."""
    return _extend(
        index_at(own), index_at(shared), cursor_at(cursor), mixer_at(mixer), workspace_at(workspace), tokens, rate
    )


@compiled
def keep(shared: int, before: IntArray, last: IntArray, tokens: Int32Array, scores: Float32Array) -> None:
    """See ``recycled.keep``."""
    _keep(index_at(shared), before, last, tokens, scores)


@compiled
def peek(own: int, shared: int, cursor: int, scratch: int, tokens: IntArray) -> None:
    """See ``text_cursor.peek``."""
    _peek(index_at(own), index_at(shared), cursor_at(cursor), cursor_at(scratch), tokens)
