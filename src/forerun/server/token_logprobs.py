"""Log-probabilities in answers: which tokens a piece of text begins, and OpenAI's blocks about them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from forerun.core.logprobs import Logprob
from forerun.core.request import Request
from forerun.models.text.token_bytes import TokenBytes

LEAST = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity. OpenAI has the same number."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer.

    Attributes:
        said: its bytes.
        logprob: of the token.
        top: bytes and log-probability of the likeliest tokens at its place.
        offset: where it begins, in characters of the answer.
    """

    said: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]]
    offset: int


class LogprobStreamer:
    """Tells of each token once, with the piece of text in which it begins; the rest comes with the last piece.

    The token that ends a text, and those that begin behind what was sent of it, because of a stop string, are left out.

    Args:
        spell: what tokens say.
        request: whose log-probabilities are kept.
    """

    def __init__(self, spell: TokenBytes, request: Request) -> None:
        self._spell, self._request = spell, request
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[TokenLogprob] = []
        self._read = self._written = self._sent = 0

    def tell(self, characters: int, rest: bool) -> list[TokenLogprob]:
        """The tokens that begin in the next characters that are sent, or all that are left.

        Args:
            characters: how many are sent.
            rest: whether the text has ended by itself, and not by a stop string.
        """
        self._sent += characters
        self._take()
        told = [each for each in self._waiting if rest or each.offset < self._sent]
        self._waiting = self._waiting[len(told) :]
        return told

    def _take(self) -> None:
        """See what the engine has kept since."""
        found = self._request.logprobs[self._read :]
        self._read += len(found)
        for each in found:
            if each.token in self._request.eos_token_ids:
                continue
            self._waiting.append(self._told(each))
            if not self._spell.skipped(each.token):
                self._written += len(self._decoder.decode(self._spell(each.token)))

    def _told(self, one: Logprob) -> TokenLogprob:
        top = [(self._spell(token), max(logprob, LEAST)) for token, logprob in one.top]
        return TokenLogprob(self._spell(one.token), max(one.logprob, LEAST), top, self._written)


class TextLogprobs(BaseModel):
    """Of a completion: one entry for each token. ``top_logprobs`` has the token itself, too."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of an answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a chat's answer."""

    content: list[ChatLogprob]
    refusal: None = None


def of_text(told: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
    """A completion's block."""
    if told is None:
        return None
    return TextLogprobs(
        tokens=[_name(each.said) for each in told],
        token_logprobs=[each.logprob for each in told],
        top_logprobs=[_likeliest(each) for each in told],
        text_offset=[each.offset for each in told],
    )


def of_chat(told: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """A chat's block."""
    if told is None:
        return None
    content = [
        ChatLogprob(
            token=_name(each.said),
            logprob=each.logprob,
            bytes=list(each.said),
            top_logprobs=[_top(said, logprob) for said, logprob in each.top],
        )
        for each in told
    ]
    return ChatLogprobs(content=content, refusal=None)


def _likeliest(one: TokenLogprob) -> dict[str, float]:
    """Likeliest first; the token itself is among them. Of two that read alike, the likelier one counts."""
    found: dict[str, float] = {}
    for said, logprob in [*one.top, (one.said, one.logprob)]:
        found.setdefault(_name(said), logprob)
    return found


def _top(said: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token=_name(said), logprob=logprob, bytes=list(said))


def _name(said: bytes) -> str:
    r"""A token as text; a part of a character as ``bytes:\xe2\x80``, as OpenAI has it."""
    try:
        return said.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)
