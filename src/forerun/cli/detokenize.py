"""From tokens, as they come, to text that never splits a character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Tokens of the prompt that are decoded along: some tokenizers drop the space before a text's first word."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """Text that is complete; ``drafted`` if all of its tokens were accepted drafts."""

    text: str
    drafted: bool


class Detokenizer:
    """Decodes the tokens that follow a prompt.

    Each time, the tokens since the last piece are decoded with and without the new ones, behind the piece before; the
    difference is the new text. It waits while it ends inside a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._start, self._read = 0, len(self._ids)
        self._drafted = True

    def add(self, token: int, drafted: bool) -> Iterator[Piece]:
        """The piece that ``token`` completes, if it does."""
        self._ids.append(token)
        self._drafted &= drafted
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            yield self._take(text)

    def flush(self) -> Iterator[Piece]:
        """What the text ends with, be it a broken character."""
        text = self._new_text()
        if text:
            yield self._take(text)

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> Piece:
        self._start, self._read = self._read, len(self._ids)
        piece = Piece(text, self._drafted)
        self._drafted = True
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
