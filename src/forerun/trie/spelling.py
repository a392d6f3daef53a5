"""The spelling of words without a leading space, by which gapped matches recognise them: a table may have `` silver``
as one token; JSON has ``silver`` after a quote, as others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.compiling import compiled
from forerun.trie.arrays import Int32Array
from forerun.trie.token_store import UNWRITTEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_WORD = 4
"""Maximum tokens of a spelling; words with longer ones have none."""

SPACES = ("Ġ", "▁")
"""Leading spaces in byte-level and SentencePiece vocabularies."""

QUOTE = '"'


@functools.lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> Int32Array:
    """Return how each word token with a leading space is spelled after a quote, int32 ``[vocabulary, LONGEST_WORD]``,
    padded with ``UNWRITTEN``; all rows are empty if the tokenizer cannot encode a quote."""
    table = np.full((tokenizer.get_vocab_size(), LONGEST_WORD), UNWRITTEN, np.int32)
    spaced = [number for token, number in tokenizer.get_vocab().items() if token.startswith(SPACES)]
    words = [word.lstrip(" ") for word in tokenizer.decode_batch([[number] for number in spaced])]
    try:
        quote = tokenizer.encode(QUOTE, add_special_tokens=False).ids
        quoted = tokenizer.encode_batch_fast([QUOTE + word for word in words], add_special_tokens=False)
    except Exception:  # tokenizers raises plain Exception
        return table
    for number, word, encoding in zip(spaced, words, quoted, strict=True):
        spelled = encoding.ids[len(quote) :]
        apart = encoding.ids[: len(quote)] == quote
        if apart and word[:1].isalnum() and len(spelled) <= LONGEST_WORD and number < len(table):
            table[number, : len(spelled)] = spelled
    return table


@compiled
def spelled(table: Int32Array, token: int, at: int) -> int:
    """Return token ``at`` of a token's spelling, or ``UNWRITTEN``."""
    if token < 0 or token >= len(table) or at >= table.shape[1]:
        return UNWRITTEN
    return int(table[token, at])
