"""What a token says, as bytes: a character may be spread over several tokens."""

from __future__ import annotations

import json
import re
from functools import cached_property

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "▁"
"""How SentencePiece writes a space."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte that has a token of its own."""
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""The byte that each of GPT-2's characters stands for."""


class TokenBytes:
    """Knows the bytes of a tokenizer's tokens.

    Args:
        tokenizer: byte-level, or SentencePiece's; of another one, what it decodes each token to.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """The bytes of a token; special ones are written as they are called, and one that has no name is empty."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def skipped(self, token: int) -> bool:
        """Whether texts leave it out."""
        return token in self._special or token >= len(self._tokenizer)

    def _find(self, token: int) -> bytes:
        if token >= len(self._tokenizer):
            return b""
        name = self._tokenizer.convert_ids_to_tokens(token)
        assert isinstance(name, str)
        if token in self._added:
            return name.encode()
        if "ByteLevel" in self._decoders:
            return bytes(map(BYTE_OF.__getitem__, name))
        if "ByteFallback" in self._decoders or "Metaspace" in self._decoders:
            byte = _BYTE.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps in which the tokenizer decodes."""
        if (
            not isinstance(self._tokenizer, PreTrainedTokenizerFast)
            or self._tokenizer.backend_tokenizer.decoder is None
        ):
            return frozenset()
        description = json.loads(self._tokenizer.backend_tokenizer.decoder.__getstate__())
        return frozenset(each["type"] for each in description.get("decoders", [description]))
