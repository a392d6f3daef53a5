"""Map tokens to bytes: a character may be spread over several tokens."""

from __future__ import annotations

import json
import re
from functools import cached_property

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenBytes:
    """A map from a tokenizer's tokens to bytes: byte-level, SentencePiece, or what it decodes each token to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return a token's bytes; a special token's are its name, and those of a token without a name are empty."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def skipped(self, token: int) -> bool:
        """Return whether decoded text omits the token."""
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
        if (
            not isinstance(self._tokenizer, PreTrainedTokenizerFast)
            or self._tokenizer.backend_tokenizer.decoder is None
        ):
            return frozenset()
        description = json.loads(self._tokenizer.backend_tokenizer.decoder.__getstate__())
        return frozenset(each["type"] for each in description.get("decoders", [description]))
