"""Gapped matches: outputs that say their prompt, or themselves, again in another form."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from forerun.core.records import RecordArray
from forerun.reference import bundled
from forerun.trie.arrays import Index
from forerun.trie.candidates import PositionEvidence
from forerun.trie.contexts import count
from forerun.trie.evidence import count_skips
from forerun.trie.gapped_match import (
    MAX_GAP_TOKENS,
    MIN_RESUMED,
    PROMPT_LOOKAHEAD,
    RESUMED_CLASSES,
    SKIPS,
    follow_matches,
    inherit_matches,
    skip_hash,
    skip_to,
    start_match,
)
from forerun.trie.spelling import spellings
from forerun.trie.tables import OUTPUT_MATCH, OWN, PROMPT_MATCH
from forerun.trie.text_cursor import TextCursor, ingest
from forerun.trie.token_store import UNWRITTEN
from forerun.trie.trie import Trie

COMMA, LINE, OPEN, COLON, CLOSE = range(5)
KEYS = range(5, 8)


def prompt_of(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """A prompt's index, matches that wait nowhere, and the position of its first token."""
    index, cursor = Index.for_tokens(len(tokens)), TextCursor.start()
    ingest(index, cursor, np.array(tokens), 0)
    return index, cursor.matches, int(cursor.ends[OWN].position) - len(tokens) + 1


def start_at(matches: RecordArray, position: int) -> None:
    start_match(matches, position, 3)


def follow(index: Index, matches: RecordArray, *tokens: int) -> Any:
    """The prompt's match after these tokens."""
    for token in tokens:
        follow_matches(index, matches, 0, token)
    return matches[0, PROMPT_MATCH]


def test_a_match_moves_on_with_a_predicted_token_and_waits_otherwise():
    index, matches, first = prompt_of([10, 11, COMMA, 12, 13, LINE, 14])
    start_at(matches, first)
    for token, at, gap in ((10, 1, 0), (11, 2, 0), (OPEN, 2, 1), (COLON, 2, 2), (12, 4, 0), (13, 5, 0), (14, 7, 0)):
        match = follow(index, matches, token)
        assert (match.position - first, match.gap) == (at, gap)
    assert matches[0, PROMPT_MATCH].resumed == 1  # once, after the gap; the last token is taken up by leaving one out
    assert matches[0, OUTPUT_MATCH].position == 0


def test_a_single_predicted_token_counts_against_a_match():
    index, matches, first = prompt_of([10, 11, 12, 13, 14])
    start_at(matches, first)
    matches[0, PROMPT_MATCH].resumed = 2
    assert follow(index, matches, OPEN, 10, OPEN, 11, OPEN).resumed == 0


def test_a_match_counts_resumptions_up_to_a_limit_and_is_given_up_behind_a_long_gap():
    values = list(range(10, 40))
    index, matches, first = prompt_of(values)
    start_at(matches, first)
    for value in range(0, 30, 2):
        match = follow(index, matches, OPEN, values[value], values[value + 1])
    assert match.resumed == MIN_RESUMED + RESUMED_CLASSES - 1
    start_at(matches, first)
    assert follow(index, matches, *[CLOSE] * (MAX_GAP_TOKENS + 1)).position == 0


def test_a_prompts_match_does_not_leave_the_prompt():
    index, matches, first = prompt_of([10, 11])
    start_at(matches, first + 1)
    assert matches[0, PROMPT_MATCH].prompt_end == first + 1
    match = follow(index, matches, 11, 0, 0, 0)
    assert (match.run, match.gap) == (1 + 6, 3)


def test_a_match_that_is_being_followed_is_not_started_again():
    index, matches, first = prompt_of([10, 11, 12, 13, 14, 15])
    start_at(matches, first)
    start_match(matches, first + 3, 32)
    assert matches[0, PROMPT_MATCH].position == first
    follow(index, matches, OPEN)
    for agreed, position in ((3, first), (32, first + 3)):  # three tokens are enough only where there is no match
        start_match(matches, first + 3, agreed)
        assert matches[0, PROMPT_MATCH].position == position


def test_a_node_inherits_active_matches():
    _, matches, first = prompt_of([10, 11, 12])
    start_at(matches, first)
    nodes = np.concatenate([matches, matches])
    inherit_matches(nodes, 0, 1)
    assert nodes[1, PROMPT_MATCH].position == 0
    nodes[0, PROMPT_MATCH].resumed = MIN_RESUMED
    inherit_matches(nodes, 0, 1)
    assert nodes[1, PROMPT_MATCH] == nodes[0, PROMPT_MATCH]


def test_a_node_inherits_nothing_from_an_earlier_draft():
    index, matches, _ = prompt_of([10, 11, 12])
    nodes = np.concatenate([matches, matches])
    earlier = nodes[1, PROMPT_MATCH]
    earlier.spelled, earlier.resumed, earlier.prompt_end = 1, MIN_RESUMED + 1, 99
    inherit_matches(nodes, 0, 1)
    follow_matches(index, nodes, 1, 5)
    assert nodes[1, PROMPT_MATCH].position == 0


def steps_of(trie: Trie, request: int, prompt: list[int], answer: list[int]) -> int:
    """Steps in which an answer is predicted with drafts of 24 tokens."""
    trie.begin(request, "n", prompt)
    at = steps = 0
    while at < len(answer):
        draft = trie.retrieve(request, 24, 24)
        node, length = -1, 0
        while at + length < len(answer):
            found = np.flatnonzero((draft.parents == node) & (draft.tokens == answer[at + length]))
            if not len(found):
                break
            node, length = int(found[0]), length + 1
        trie.extend(request, answer[at : at + length + 1])
        at, steps = at + length + 1, steps + 1
    trie.finish(request)
    return steps


def table(rng: random.Random, width: int, separators: int = 1, shift: int = 0) -> tuple[list[int], list[int]]:
    """A table of random cells of so many tokens, and the records that write it. The first tokens of its cells are
    higher by ``shift``."""
    rows = [[[rng.randrange(20, 5000) for _ in range(width)] for _ in KEYS] for _ in range(8)]
    written = [t for row in rows for cell in row for t in (shift + cell[0], *cell[1:], *[COMMA] * separators)]
    records = [[t for key, cell in zip(KEYS, row, strict=True) for t in (key, COLON, *cell, COMMA)] for row in rows]
    return written, [t for record in records for t in (OPEN, *record, CLOSE, LINE)]


@pytest.mark.parametrize("separators", [1, PROMPT_LOOKAHEAD - 1])
def test_a_table_written_as_records_is_drafted_across_cells(separators):
    """Where n-grams know none of the values: without matches, no draft could hold the next cell's first token."""
    rng = random.Random(separators)
    trie = Trie()
    for request in range(12):
        prompt, answer = table(rng, 2, separators)
        steps = steps_of(trie, request, [*prompt, LINE], answer)
    assert len(answer) / steps > 8, len(answer) / steps  # a cell's key, colon, two tokens and comma are five


def spelled_prompt(tokens: list[int]) -> tuple[Index, RecordArray, int]:
    """As ``prompt_of``, where token 90 is spelled 91, 92 without its space, and 93 is 94."""
    index, matches, first = prompt_of(tokens)
    table = np.full((100, 3), -1, np.int32)
    table[90, :2], table[93, 0] = (91, 92), 94
    return index._replace(spelling=table), matches, first


def test_a_match_goes_through_the_spelling_of_a_word():
    index, matches, first = spelled_prompt([10, COMMA, 90, 11, COMMA, 93, 12])
    start_at(matches, first)
    for token, at, inside in ((10, 1, 0), (OPEN, 1, 0), (91, 2, 1), (92, 3, 0), (11, 4, 0), (OPEN, 4, 0), (94, 6, 0)):
        match = follow(index, matches, token)
        assert (match.position - first, match.spelled) == (at, inside)
    assert match.resumed == 1


def test_a_word_with_another_spelling_is_passed_over():
    index, matches, first = spelled_prompt([90, 11, 12])
    start_at(matches, first)
    for token, at, gap in ((91, 0, 0), (OPEN, 1, 1), (11, 2, 0)):
        match = follow(index, matches, token)
        assert (match.position - first, match.gap, match.spelled) == (at, gap, token == 91)


def test_a_skip_leads_to_a_token_ahead_or_to_its_spelling():
    index, matches, first = spelled_prompt([COMMA, 90, 11])
    start_at(matches, first)
    skips = {COMMA: 0, 90: 1, 91: PROMPT_LOOKAHEAD + 1, 11: 2, 92: SKIPS, OPEN: SKIPS}
    assert {token: skip_to(index, matches[0, PROMPT_MATCH], PROMPT_MATCH, token) for token in skips} == skips


def test_skips_are_counted_where_the_prompts_match_waits_and_the_outputs_is_followed():
    _, matches, first = prompt_of([10, 11, 12])
    hashed = np.uint64(12345)
    for row in (PROMPT_MATCH, OUTPUT_MATCH):
        match = matches[0, row]
        assert skip_hash(match, row, hashed) == 0
        match.position, match.resumed = first, MIN_RESUMED
        for gap in (0, 1):
            match.gap = gap
            assert (skip_hash(match, row, hashed) != 0) == ((gap != 0) == (row == PROMPT_MATCH))


def steps_through_cells(spelled: bool) -> float:
    """Tokens per step for tables whose cells' first tokens are other ones in the records."""
    rng = random.Random(5)
    trie = Trie()
    trie._spelling = np.array([[-1], *([-1] for _ in range(9_999)), *([token] for token in range(5_000))], np.int32)
    if not spelled:
        trie._spelling = trie._spelling[:1]
    taken = steps = 0
    for request in range(12):
        prompt, answer = table(rng, 4, shift=10_000)
        taken, steps = taken + len(answer), steps + steps_of(trie, request, prompt, answer)
    return taken / steps


def test_cells_are_drafted_in_other_tokens_where_their_spelling_is_known():
    assert steps_through_cells(spelled=True) > 1.5 * steps_through_cells(spelled=False)


def test_spellings_are_those_behind_a_quote():
    tokenizer = AutoTokenizer.from_pretrained(bundled("target")).backend_tokenizer
    table = spellings(tokenizer)
    assert table.shape[0] == tokenizer.get_vocab_size()
    known = 0
    for token, number in tokenizer.get_vocab().items():
        spelling = [part for part in table[number].tolist() if part >= 0]
        if spelling:
            known += 1
            assert tokenizer.decode([number]) == " " + tokenizer.decode(spelling)
        else:
            assert not (token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha() and len(token) < 5)
    assert known > 1000


def test_a_context_with_the_hash_of_a_skip_is_no_skip():
    """Contexts are known by 31 bits, so another one's followers may lie there: tokens, which are no skips."""
    index, matches, first = prompt_of([10, 11, 12])
    hashed, evidence, match = np.uint64(12345), PositionEvidence.allocate(), matches[0, PROMPT_MATCH]
    match.position, match.resumed, match.gap = first, MIN_RESUMED, 1
    for token in (5000, 1, SKIPS + 1):
        count(index, skip_hash(match, PROMPT_MATCH, hashed), token)
        count_skips(index, match, PROMPT_MATCH, hashed, evidence)
        known = {skip for skip in range(SKIPS) if evidence.skips[PROMPT_MATCH, skip] != evidence.skips[PROMPT_MATCH, 0]}
        assert known == (set() if token == 5000 else {1})


def test_a_tokenizer_that_cannot_write_a_quote_has_no_spellings():
    tokenizer = Tokenizer(models.WordLevel({"▁do": 0, "▁re": 1, "mi": 2}))
    assert (spellings(tokenizer) == UNWRITTEN).all()
    trie = Trie()
    trie.spell(tokenizer)
