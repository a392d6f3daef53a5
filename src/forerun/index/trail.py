"""The trails of an output that says something again in another form: a table as JSON, a record like the one before.

Between two things that it copies such an output says something of its own, and where it takes the text up again, its
last tokens are no known context. A trail waits behind what was copied last and foresees what comes there; the first of
the next few tokens that comes moves it on. One trail goes through the prompt, for what is rearranged, the other through
the output, for its own form; each node of a draft has its own.

A word that starts with a space in the prompt may start without one in the output, in other tokens; the prompt's trail
goes through its spelling then (``spelling.py``).

What came instead of a token that the prompt's trail was sure of is a context too: where a table has a comma, JSON may
have a quote and a comma. What came instead of it twice takes its place. And the output's last two tokens are a context
of the way on: behind a colon and a quote, say, not as in the last record, but by the spelling of the token after next.
"""

from __future__ import annotations

import numpy as np

from forerun.core.tree import IntArray
from forerun.index.arrays import Index, mix
from forerun.index.compiling import compiled
from forerun.index.contexts import times
from forerun.index.history import UNWRITTEN, following, read
from forerun.index.spelling import spelled

PROMPT, OUTPUT = range(2)
"""Rows of ``trails``, int64 ``[nodes, 2, COLUMNS]``."""

AT, JOINED, GAP, RUN, LIMIT, SPELLED = range(6)
"""Columns: where a trail waits (0: none), how often it was taken up again, tokens since it last was followed, tokens
that were followed in a row, the prompt's last position, and tokens that came of the spelling of the token at ``AT``. A
trail is taken up by two tokens in a row; one alone came by chance, and counts against it."""

COLUMNS = 6

AHEAD, FAR_AHEAD = 4, 8
"""Tokens of the prompt and of the output that may be left out."""

LOST = 40
"""Tokens after which a trail that was not taken up again is given up."""

LAID, RELAID = 3, 6
"""Tokens that must agree before a trail is laid where there is none, and where one waits."""

HEARD, PLAIN = 2, 32
"""Times that a trail must have been taken up before it says anything, and tokens followed in a row from which on it is
a plain copy, which needs no trail."""

JOINS, GAPS = 3, 7
"""Classes of how often it was taken up, and of tokens since."""

SPELT, SPELT_AHEAD, INSIDE, UNFORESEEN, ASTRAY, NEXT, OTHER = range(AHEAD, AHEAD + 7)
"""What the prompt's trail says of a token: so many ahead, the first of the next token's spelling, of that of one ahead,
the next of a spelling, not foreseen, or not the next of a spelling; and what the output's trail does."""

KINDS = AHEAD + 7

TRAIL_CELLS = KINDS * JOINS * GAPS

BESIDE = np.uint64(0xD6E8FEB86659FD93)
"""Where the hashes of what a trail says start as contexts, far from those of a text's."""

ONWARD = 1 << 31
"""What the hash of two tokens is mixed with, plus the row, to be the context of the way on; no token has this id."""

WAYS = 2 * AHEAD
"""Ways on: to a token so many ahead, or to its spelling; the last: none of these."""


@compiled
def next_on(own: Index, trails: IntArray, at: int, row: int, position: int) -> int:
    """The token at a position of a trail, or ``UNWRITTEN`` where it ends."""
    if position == 0 or (position > trails[at, row, LIMIT]) != (row == OUTPUT):
        return UNWRITTEN
    return read(own, position)


@compiled
def heard(trails: IntArray, at: int, row: int) -> bool:
    """Whether a trail says anything here."""
    plain = trails[at, row, GAP] == 0 and trails[at, row, RUN] >= PLAIN
    return bool(trails[at, row, AT] != 0 and trails[at, row, JOINED] >= HEARD and not plain)


@compiled
def instead(said: int) -> np.uint64:
    """The hash of a token that a trail says, as a context of what came instead of it."""
    return mix(BESIDE, said)


@compiled
def turn(own: Index, trails: IntArray, at: int) -> np.uint64:
    """The context of what comes instead of what the prompt's trail says, where it is being followed; else 0."""
    if trails[at, PROMPT, GAP] != 0 or not heard(trails, at, PROMPT) or trails[at, PROMPT, SPELLED] != 0:
        return np.uint64(0)
    said = next_on(own, trails, at, PROMPT, trails[at, PROMPT, AT])
    return np.uint64(0) if said == UNWRITTEN else instead(said)


@compiled
def crossing(trails: IntArray, at: int, row: int, hashed: np.uint64) -> np.uint64:
    """The context of the way on behind two tokens, where the prompt's trail waits or the output's is followed; or 0."""
    if trails[at, row, AT] == 0 or trails[at, row, JOINED] + 1 < HEARD or trails[at, row, SPELLED] != 0:
        return np.uint64(0)
    waits = trails[at, row, GAP] != 0
    return mix(hashed, ONWARD + row) if waits == (row == PROMPT) else np.uint64(0)


@compiled
def way_on(own: Index, trails: IntArray, at: int, row: int, token: int) -> int:
    """The way of a trail to a token."""
    position = trails[at, row, AT]
    for ahead in range(AHEAD if row == PROMPT else 1):
        said = next_on(own, trails, at, row, position)
        if said == UNWRITTEN:
            break
        if said == token:
            return ahead
        if row == PROMPT and spelled(own.spelling, said, 0) == token:
            return AHEAD + ahead
        position = following(own, position)
    return WAYS


@compiled
def _taken_up(trails: IntArray, at: int, row: int) -> None:
    """A token came that a trail foresaw."""
    trails[at, row, RUN] = trails[at, row, RUN] + 1 if trails[at, row, GAP] == 0 else 1
    if trails[at, row, RUN] == 2:
        trails[at, row, JOINED] = min(trails[at, row, JOINED] + 1, HEARD + JOINS - 1)
    trails[at, row, GAP] = 0


@compiled
def _spell(own: Index, trails: IntArray, at: int, position: int, said: int, came: int) -> None:
    """So many tokens of a word's spelling came; behind the last the trail moves on."""
    more = spelled(own.spelling, said, came) != UNWRITTEN
    trails[at, PROMPT, SPELLED] = came if more else 0
    trails[at, PROMPT, AT] = position if more else following(own, position)


@compiled
def _inside(own: Index, trails: IntArray, at: int, token: int) -> bool:
    """Whether a word's spelling goes on; if not, the word is passed by."""
    position, came = trails[at, PROMPT, AT], trails[at, PROMPT, SPELLED]
    said = read(own, position)
    if spelled(own.spelling, said, came) == token:
        _taken_up(trails, at, PROMPT)
        _spell(own, trails, at, position, said, came + 1)
        return True
    trails[at, PROMPT, AT], trails[at, PROMPT, SPELLED] = following(own, position), 0
    return False


@compiled
def _follow(own: Index, trails: IntArray, at: int, row: int, token: int, ahead: int) -> None:
    """Move a trail on if one of the tokens that it foresees came."""
    if trails[at, row, SPELLED] != 0 and _inside(own, trails, at, token):
        return
    position = trails[at, row, AT]
    if position == 0:
        return
    for _ in range(ahead):
        said = next_on(own, trails, at, row, position)
        if said == UNWRITTEN:
            break
        if said == token:
            _taken_up(trails, at, row)
            trails[at, row, AT] = following(own, position)
            return
        if row == PROMPT and spelled(own.spelling, said, 0) == token:
            _taken_up(trails, at, row)
            _spell(own, trails, at, position, said, 1)
            return
        position = following(own, position)
    if trails[at, row, GAP] == 0 and trails[at, row, RUN] == 1:
        trails[at, row, JOINED] = max(trails[at, row, JOINED] - 1, 0)
    turned = turn(own, trails, at) if row == PROMPT else np.uint64(0)
    if turned != 0 and times(own, turned, token) > 1:
        trails[at, row, AT] = following(own, trails[at, row, AT])
    trails[at, row, GAP] += 1
    if trails[at, row, GAP] > LOST:
        trails[at, row, AT] = 0


@compiled
def follow_trails(own: Index, trails: IntArray, at: int, token: int) -> None:
    """Move both trails on by a token."""
    _follow(own, trails, at, PROMPT, token, AHEAD)
    _follow(own, trails, at, OUTPUT, token, FAR_AHEAD)


@compiled
def branch(trails: IntArray, above: int, at: int) -> None:
    """Give a node the trails of the one above it; those that say nothing would not by its depth."""
    for row in range(2):
        trails[at, row, AT] = 0
        if trails[above, row, AT] != 0 and trails[above, row, JOINED] >= HEARD:
            for column in range(COLUMNS):
                trails[at, row, column] = trails[above, row, column]


@compiled
def lay_trail(trails: IntArray, position: int, agreed: int) -> None:
    """Let a trail begin where a copy stands, unless it is being followed elsewhere."""
    row = PROMPT if position <= trails[0, PROMPT, LIMIT] else OUTPUT
    waiting, gap = trails[0, row, AT], trails[0, row, GAP]
    if position in (0, waiting) or agreed < (LAID if waiting == 0 else RELAID) or (waiting != 0 and gap == 0):
        return
    trails[0, row, AT], trails[0, row, GAP], trails[0, row, RUN], trails[0, row, SPELLED] = position, 0, RELAID, 0
    trails[0, row, JOINED] = min(trails[0, row, JOINED], HEARD) if waiting != 0 else 0


@compiled
def trail_cell(kind: int, joined: int, gap: int) -> int:
    """The cell of one of ``KINDS``."""
    if gap > 2:
        gap = 3 if gap < 5 else 4 if gap < 8 else 5 if gap < 14 else 6
    return (kind * JOINS + joined - HEARD) * GAPS + gap
