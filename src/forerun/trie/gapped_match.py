"""Gapped matches: predict output that repeats an earlier passage in another form.

A table repeated as JSON, or a record like the one before it, copies a value, adds a few new tokens, and copies the next
value. The tokens just before a value are no known context, so n-grams cannot predict it. A gapped match can: it points
after the last copied token, predicts the next few tokens of that passage, and moves past the first of them that comes.
A sequence, and each node of a draft, has two: ``PROMPT_MATCH`` through the prompt, for rearranged content, and
``OUTPUT_MATCH`` through the output, for repeated form. Matches also use:

- *Spelling.* A word after a space in the prompt may follow a quote in the output, as other tokens. The prompt's match
  follows that spelling (``spelling``).
- *Substitutes.* Where the prompt has a comma, JSON may have a quote and a comma. Tokens that replace a confident
  prediction are counted; one counted twice moves the match on, as if the prediction had come.
- *Skips.* The last two tokens of the output, with the match, are a context for the *skip*: which predicted token comes
  next. After a colon and a quote, for example, it is the spelling of the token after next.
"""

from __future__ import annotations

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.trie.arrays import Index, mix
from forerun.trie.contexts import times
from forerun.trie.spelling import spelled
from forerun.trie.tables import OUTPUT_MATCH, PROMPT_MATCH
from forerun.trie.token_store import UNWRITTEN, following, read

PROMPT_LOOKAHEAD, OUTPUT_LOOKAHEAD = 4, 8
"""How many tokens ahead move each match on; the output's match drafts only the next token."""

MAX_GAP_TOKENS = 40
"""A match ends after more unpredicted tokens than this."""

START_AGREED, RESTART_AGREED = 3, 6
"""Tokens that must agree to start a match, and to replace a waiting one."""

MIN_RESUMED = 2
"""Times that a match must resume before it predicts."""

PLAIN_COPY_RUN = 32
"""After this many predicted tokens in a row, a match is an ordinary copy and stops predicting."""

RESUMED_CLASSES, GAP_CLASSES = 3, 7
"""Classes of ``GAPPED_MATCH.resumed`` and ``.gap``."""

SPELT, SPELT_AHEAD, INSIDE_SPELLING, UNPREDICTED, OUTSIDE_SPELLING, NEXT, OTHER = range(
    PROMPT_LOOKAHEAD, PROMPT_LOOKAHEAD + 7
)
"""How a match predicts a token.

- Prompt: a number below ``PROMPT_LOOKAHEAD`` is the distance. ``SPELT``, ``SPELT_AHEAD``: starts the spelling of the
  token at the match, or of a later one. ``INSIDE_SPELLING``: continues a spelling. ``UNPREDICTED``,
  ``OUTSIDE_SPELLING``: none of these, outside and inside a spelling.
- Output: ``NEXT`` is the token at the match, ``OTHER`` any other.
"""

MATCH_KINDS = PROMPT_LOOKAHEAD + 7

GAPPED_MATCH_CELLS = MATCH_KINDS * RESUMED_CLASSES * GAP_CLASSES

SUBSTITUTE_SEED = np.uint64(0xD6E8FEB86659FD93)
"""Seed for the hashes of substitutes' contexts, far from those of sequences."""

SKIP_MARK = 1 << 31
"""Mixed into a skip context's hash, plus the match's number. No token has such an id."""

SKIPS = 2 * PROMPT_LOOKAHEAD
"""The skip to an unpredicted token. Others are the distance to a token, plus the lookahead if to its spelling."""


@compiled
def next_on(own: Index, match: np.record, row: int, position: int) -> int:
    """Return the token at a position of a match, or ``UNWRITTEN`` where the match ends."""
    if position == 0 or (position > match.prompt_end) != (row == OUTPUT_MATCH):
        return UNWRITTEN
    return read(own, position)


@compiled
def active(match: np.record) -> bool:
    """Return whether a match predicts anything here."""
    plain = match.gap == 0 and match.run >= PLAIN_COPY_RUN
    return bool(match.position != 0 and match.resumed >= MIN_RESUMED and not plain)


@compiled
def substitute_hash(predicted: int) -> np.uint64:
    """Return the context of the substitutes for a predicted token."""
    return mix(SUBSTITUTE_SEED, predicted)


@compiled
def current_substitute_hash(own: Index, match: np.record) -> np.uint64:
    """Return the context of the substitutes for the prompt match's next token while the output follows it; else 0."""
    if match.gap != 0 or not active(match) or match.spelled != 0:
        return np.uint64(0)
    predicted = next_on(own, match, PROMPT_MATCH, match.position)
    return np.uint64(0) if predicted == UNWRITTEN else substitute_hash(predicted)


@compiled
def skip_hash(match: np.record, row: int, hashed: np.uint64) -> np.uint64:
    """Return the context of the skip, if the prompt's match waits or the output's is followed, else 0."""
    if match.position == 0 or match.resumed + 1 < MIN_RESUMED or match.spelled != 0:
        return np.uint64(0)
    waits = match.gap != 0
    return mix(hashed, SKIP_MARK + row) if waits == (row == PROMPT_MATCH) else np.uint64(0)


@compiled
def skip_to(own: Index, match: np.record, row: int, token: int) -> int:
    """Return the skip from a match to a token."""
    position = match.position
    for ahead in range(PROMPT_LOOKAHEAD if row == PROMPT_MATCH else 1):
        predicted = next_on(own, match, row, position)
        if predicted == UNWRITTEN:
            break
        if predicted == token:
            return ahead
        if row == PROMPT_MATCH and spelled(own.spelling, predicted, 0) == token:
            return PROMPT_LOOKAHEAD + ahead
        position = following(own, position)
    return SKIPS


@compiled
def _note_hit(match: np.record) -> None:
    match.run = match.run + 1 if match.gap == 0 else 1
    if match.run == 2:
        match.resumed = min(match.resumed + 1, MIN_RESUMED + RESUMED_CLASSES - 1)
    match.gap = 0


@compiled
def _note_spelling(own: Index, match: np.record, position: int, predicted: int, came: int) -> None:
    more = spelled(own.spelling, predicted, came) != UNWRITTEN
    match.spelled = came if more else 0
    match.position = position if more else following(own, position)


@compiled
def _continue_spelling(own: Index, match: np.record, token: int) -> bool:
    """Continue a spelling; if the token does not fit, skip the word and return False."""
    position, came = match.position, match.spelled
    predicted = read(own, position)
    if spelled(own.spelling, predicted, came) == token:
        _note_hit(match)
        _note_spelling(own, match, position, predicted, came + 1)
        return True
    match.position, match.spelled = following(own, position), 0
    return False


@compiled
def _advance_on_hit(own: Index, match: np.record, row: int, token: int, ahead: int) -> bool:
    """Move a match on if the token is among the next ``ahead`` predictions; return whether it is."""
    position = match.position
    for _ in range(ahead):
        predicted = next_on(own, match, row, position)
        if predicted == UNWRITTEN:
            break
        if predicted == token:
            _note_hit(match)
            match.position = following(own, position)
            return True
        if row == PROMPT_MATCH and spelled(own.spelling, predicted, 0) == token:
            _note_hit(match)
            _note_spelling(own, match, position, predicted, 1)
            return True
        position = following(own, position)
    return False


@compiled
def _note_miss(own: Index, match: np.record, row: int, token: int) -> None:
    if match.gap == 0 and match.run == 1:  # the previous hit was chance
        match.resumed = max(match.resumed - 1, 0)
    substitutes = current_substitute_hash(own, match) if row == PROMPT_MATCH else np.uint64(0)
    if substitutes != 0 and times(own, substitutes, token) > 1:
        match.position = following(own, match.position)
    gap = match.gap + 1
    match.gap = gap
    if gap > MAX_GAP_TOKENS:
        match.position = 0


@compiled
def _follow(own: Index, match: np.record, row: int, token: int, ahead: int) -> None:
    if match.spelled != 0 and _continue_spelling(own, match, token):
        return
    if match.position != 0 and not _advance_on_hit(own, match, row, token, ahead):
        _note_miss(own, match, row, token)


@compiled
def follow_matches(own: Index, matches: RecordArray, node: int, token: int) -> None:
    """Move both matches by a token."""
    _follow(own, matches[node, PROMPT_MATCH], PROMPT_MATCH, token, PROMPT_LOOKAHEAD)
    _follow(own, matches[node, OUTPUT_MATCH], OUTPUT_MATCH, token, OUTPUT_LOOKAHEAD)


@compiled
def inherit_matches(matches: RecordArray, above: int, node: int) -> None:
    """Copy the parent's active matches to a node: within a draft's depth, others would hardly become active."""
    for row in range(2):
        matches[node, row].position = matches[node, row].spelled = 0  # clears an earlier draft's
        if matches[above, row].position != 0 and matches[above, row].resumed >= MIN_RESUMED:
            matches[node, row] = matches[above, row]


@compiled
def start_match(matches: RecordArray, position: int, agreed: int) -> None:
    """Start a match where a copy points, unless one is followed or the copy agrees too little."""
    row = PROMPT_MATCH if position <= matches[0, PROMPT_MATCH].prompt_end else OUTPUT_MATCH
    match = matches[0, row]
    waiting = match.position
    followed = waiting != 0 and match.gap == 0
    if position in (0, waiting) or followed or agreed < (START_AGREED if waiting == 0 else RESTART_AGREED):
        return
    match.position, match.gap, match.run, match.spelled = position, 0, RESTART_AGREED, 0
    match.resumed = min(match.resumed, MIN_RESUMED) if waiting != 0 else 0


@compiled
def match_cell(kind: int, resumed: int, gap: int) -> int:
    """Return the cell of one of ``MATCH_KINDS``, among ``GAPPED_MATCH_CELLS``."""
    if gap > 2:
        gap = 3 if gap < 5 else 4 if gap < 8 else 5 if gap < 14 else 6
    return (kind * RESUMED_CLASSES + resumed - MIN_RESUMED) * GAP_CLASSES + gap
