"""Trails: how an output is foreseen that says an earlier passage again in another form.

A table is said again as JSON, or a record like the record before it. Such an output copies a value, writes a few tokens
of its own, and copies the next value. The last tokens before that next value are no known context, so n-grams cannot
foresee it. A trail can. It is a pointer behind what was copied last. It foresees the next few tokens of that passage,
and the first of them that comes moves it on.

Two trails are kept for the text, and for each node of a draft. ``PROMPT`` leads through the prompt, for what is
rearranged. ``OUTPUT`` leads through the output, for a form that repeats itself.

Three more things are known to trails:

- *Spelling.* A word with a space before it in the prompt may have none in the output, and then has other tokens. The
  prompt's trail goes through that spelling (``spelling``).
- *Stand-ins.* The token that the prompt's trail is sure of is a context of its own. Where a table has a comma, JSON may
  have a quote and a comma. Such stand-ins are counted. One that was counted twice moves the trail on, as if the
  foreseen token had come.
- *Crossings.* The output's last two tokens, together with the trail, are a context of the *way* on: which of the
  foreseen tokens comes next. After a colon and a quote, for example, it is the spelling of the token after next.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import Index, mix
from forerun.trie.contexts import times
from forerun.trie.spelling import spelled
from forerun.trie.tables import OUTPUT, PROMPT, RecordArray
from forerun.trie.token_store import UNWRITTEN, following, read

AHEAD, FAR_AHEAD = 4, 8
"""How many tokens the prompt's trail and the output's look ahead to be moved on. The output's is drafted one ahead."""

LOST = 40
"""A trail that was not followed for more tokens than this is given up."""

LAID, RELAID = 3, 6
"""Tokens that must agree before a trail is laid where there is none, and where one waits."""

HEARD = 2
"""A trail says nothing before it was resumed so often."""

PLAIN = 32
"""After so many tokens in a row a trail is an ordinary copy and says nothing either."""

JOINS, GAPS = 3, 7
"""Classes of ``TRAIL.resumed`` and of ``TRAIL.gap``."""

SPELT, SPELT_AHEAD, INSIDE, UNFORESEEN, ASTRAY, NEXT, OTHER = range(AHEAD, AHEAD + 7)
"""What a trail says of a token.

- The prompt's: from 0 to ``AHEAD - 1``, it is so many ahead. ``SPELT``, ``SPELT_AHEAD``: it begins the spelling of the
  token at the trail, or of one further ahead. ``INSIDE``: it is the next of a spelling that has begun. ``UNFORESEEN``
  and ``ASTRAY``: it is none of these, outside and inside a spelling.
- The output's: ``NEXT``, it is the token at the trail. ``OTHER``: it is not.
"""

KINDS = AHEAD + 7

TRAIL_CELLS = KINDS * JOINS * GAPS

BESIDE = np.uint64(0xD6E8FEB86659FD93)
"""The hashes of stand-ins' contexts start from this, far from those of a text's contexts."""

ONWARD = 1 << 31
"""The hash of a crossing is that of two tokens mixed with this plus the trail's number. No token has such an id."""

WAYS = 2 * AHEAD
"""Ways on: 0 to ``AHEAD - 1`` to a token so many ahead, from ``AHEAD`` on to its spelling, and this to any other."""


@compiled
def next_on(own: Index, trail: np.record, row: int, position: int) -> int:
    """The token at a position of a trail, or ``UNWRITTEN`` where the trail ends."""
    if position == 0 or (position > trail.prompt_end) != (row == OUTPUT):
        return UNWRITTEN
    return read(own, position)


@compiled
def heard(trail: np.record) -> bool:
    """Whether a trail says anything here."""
    plain = trail.gap == 0 and trail.run >= PLAIN
    return bool(trail.position != 0 and trail.resumed >= HEARD and not plain)


@compiled
def instead(said: int) -> np.uint64:
    """The context of what stands in for a token that a trail foresees."""
    return mix(BESIDE, said)


@compiled
def turn(own: Index, trail: np.record) -> np.uint64:
    """The context of what stands in for the next token of the prompt's trail, while that is being followed; else 0."""
    if trail.gap != 0 or not heard(trail) or trail.spelled != 0:
        return np.uint64(0)
    said = next_on(own, trail, PROMPT, trail.position)
    return np.uint64(0) if said == UNWRITTEN else instead(said)


@compiled
def crossing(trail: np.record, row: int, hashed: np.uint64) -> np.uint64:
    """The context of the way on, or 0; ``hashed`` is of the last two tokens.

    There is one where the prompt's trail waits, and one where the output's trail is being followed.
    """
    if trail.position == 0 or trail.resumed + 1 < HEARD or trail.spelled != 0:
        return np.uint64(0)
    waits = trail.gap != 0
    return mix(hashed, ONWARD + row) if waits == (row == PROMPT) else np.uint64(0)


@compiled
def way_on(own: Index, trail: np.record, row: int, token: int) -> int:
    """The way from a trail to a token."""
    position = trail.position
    for ahead in range(AHEAD if row == PROMPT else 1):
        said = next_on(own, trail, row, position)
        if said == UNWRITTEN:
            break
        if said == token:
            return ahead
        if row == PROMPT and spelled(own.spelling, said, 0) == token:
            return AHEAD + ahead
        position = following(own, position)
    return WAYS


@compiled
def _taken_up(trail: np.record) -> None:
    """Note that a foreseen token came."""
    trail.run = trail.run + 1 if trail.gap == 0 else 1
    if trail.run == 2:
        trail.resumed = min(trail.resumed + 1, HEARD + JOINS - 1)
    trail.gap = 0


@compiled
def _spell(own: Index, trail: np.record, position: int, said: int, came: int) -> None:
    """Note that so many tokens of a word's spelling came; after the last one the trail moves on."""
    more = spelled(own.spelling, said, came) != UNWRITTEN
    trail.spelled = came if more else 0
    trail.position = position if more else following(own, position)


@compiled
def _inside(own: Index, trail: np.record, token: int) -> bool:
    """Whether a spelling that has begun goes on with the token; if not, its word is passed over."""
    position, came = trail.position, trail.spelled
    said = read(own, position)
    if spelled(own.spelling, said, came) == token:
        _taken_up(trail)
        _spell(own, trail, position, said, came + 1)
        return True
    trail.position, trail.spelled = following(own, position), 0
    return False


@compiled
def _found(own: Index, trail: np.record, row: int, token: int, ahead: int) -> bool:
    """Move a trail on if the token is one of the next ``ahead`` that it foresees; whether it is."""
    position = trail.position
    for _ in range(ahead):
        said = next_on(own, trail, row, position)
        if said == UNWRITTEN:
            break
        if said == token:
            _taken_up(trail)
            trail.position = following(own, position)
            return True
        if row == PROMPT and spelled(own.spelling, said, 0) == token:
            _taken_up(trail)
            _spell(own, trail, position, said, 1)
            return True
        position = following(own, position)
    return False


@compiled
def _missed(own: Index, trail: np.record, row: int, token: int) -> None:
    """Note that a token came that a trail does not foresee."""
    if trail.gap == 0 and trail.run == 1:  # the one before was foreseen by chance
        trail.resumed = max(trail.resumed - 1, 0)
    turned = turn(own, trail) if row == PROMPT else np.uint64(0)
    if turned != 0 and times(own, turned, token) > 1:
        trail.position = following(own, trail.position)
    gap = trail.gap + 1
    trail.gap = gap
    if gap > LOST:
        trail.position = 0


@compiled
def _follow(own: Index, trail: np.record, row: int, token: int, ahead: int) -> None:
    """Tell a trail which token came."""
    if trail.spelled != 0 and _inside(own, trail, token):
        return
    if trail.position != 0 and not _found(own, trail, row, token, ahead):
        _missed(own, trail, row, token)


@compiled
def follow_trails(own: Index, trails: RecordArray, node: int, token: int) -> None:
    """Tell both trails which token came."""
    _follow(own, trails[node, PROMPT], PROMPT, token, AHEAD)
    _follow(own, trails[node, OUTPUT], OUTPUT, token, FAR_AHEAD)


@compiled
def branch(trails: RecordArray, above: int, node: int) -> None:
    """Give a node the trails of the node above it.

    A trail that is not heard yet is left out: within the depth of a draft it would hardly be.
    """
    for row in range(2):
        trails[node, row].position = trails[node, row].spelled = 0  # else what stood here before would go on
        if trails[above, row].position != 0 and trails[above, row].resumed >= HEARD:
            trails[node, row] = trails[above, row]


@compiled
def lay_trail(trails: RecordArray, position: int, agreed: int) -> None:
    """Start a trail where a copy stands, unless one is being followed or the copy agrees too little."""
    row = PROMPT if position <= trails[0, PROMPT].prompt_end else OUTPUT
    trail = trails[0, row]
    waiting, gap = trail.position, trail.gap
    if position in (0, waiting) or agreed < (LAID if waiting == 0 else RELAID) or (waiting != 0 and gap == 0):
        return
    trail.position, trail.gap, trail.run, trail.spelled = position, 0, RELAID, 0
    trail.resumed = min(trail.resumed, HEARD) if waiting != 0 else 0


@compiled
def trail_cell(kind: int, resumed: int, gap: int) -> int:
    """The cell of one of ``KINDS``, among ``TRAIL_CELLS``."""
    if gap > 2:
        gap = 3 if gap < 5 else 4 if gap < 8 else 5 if gap < 14 else 6
    return (kind * JOINS + resumed - HEARD) * GAPS + gap
