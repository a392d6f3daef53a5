"""Decode a stream of tokens to text, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from forerun.core.tree import IntArray
from forerun.models.text.token_bytes import TokenBytes

CONTEXT_TOKENS = 8
"""Minimum prompt tokens decoded with the output: tokenizers may drop a first space, or decode bytes as a unit."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """A piece of text with whole characters; ``drafted`` if all of its tokens were accepted drafts."""

    text: str
    drafted: bool


class Detokenizer:
    """A decoder of the tokens that follow a prompt, with special tokens left out except ``keep``.

    The last piece's tokens are decoded with and without later tokens; the difference is new text, unless its bytes end
    inside a character. A replacement character alone is no sign of that: it may be genuine, or never be completed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] | IntArray,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special} if keep else ()
        self._left_out = frozenset(special) - keep if keep else None
        start = max(0, len(prompt) - CONTEXT_TOKENS)
        while start and _is_byte(tokenizer, prompt[start]):
            start -= 1
        self._ids = [int(token) for token in prompt[start:]]
        self._start, self._read = 0, len(self._ids)
        self._drafted = True

    def add(self, token: int, drafted: bool) -> Iterator[Piece]:
        """Yield the piece that ``token`` completes, if any."""
        self._ids.append(token)
        self._drafted &= drafted
        text = self._new_text()
        if text and not (text.endswith(_INCOMPLETE) and self._inside_character()):
            yield self._take(text)

    def flush(self) -> Iterator[Piece]:
        """Yield the remaining text, even if it ends in a broken character."""
        text = self._new_text()
        if text:
            yield self._take(text)

    def _inside_character(self) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self._ids[self._read :]:
            if not self._spell.skipped(token):
                decoder.decode(self._spell(token))
        return bool(decoder.getstate()[0])

    @cached_property
    def _spell(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> Piece:
        self._start, self._read = self._read, len(self._ids)
        piece = Piece(text, self._drafted)
        self._drafted = True
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        if self._left_out is not None:
            ids = [token for token in ids if token not in self._left_out]
        skip = self._left_out is None
        text = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _is_byte(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is a byte of a character that the vocabulary lacks, as in ``<0xE4>``."""
    word = tokenizer.convert_ids_to_tokens(int(token))
    return isinstance(word, str) and word.startswith("<0x") and word.endswith(">")
