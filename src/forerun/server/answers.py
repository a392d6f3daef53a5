"""From tokens to what is sent of them: whole characters up to a stop string, log-probabilities, and where tokens
came from."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from forerun.core.origin import Origin
from forerun.core.request import FinishReason, Logprob, Request
from forerun.core.tree import IntArray
from forerun.engine.result import Commit
from forerun.models.text.detokenize import Detokenizer
from forerun.models.text.message_parser import CallDelta
from forerun.models.text.token_bytes import TokenBytes

Finish = Literal["stop", "length", "tool_calls"]
FINISH: dict[FinishReason, Finish] = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's words for why a text ended; an error is none of them."""
IMPOSSIBLE_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI has the same number."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer.

    Attributes:
        spelling: its bytes.
        logprob: its log-probability; None for the first token of all.
        top: bytes and log-probability of the likeliest tokens at its place.
        offset: where it begins, in characters of the answer.
    """

    spelling: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    offset: int


@dataclass(frozen=True)
class Delta:
    """New text of one choice. The one with a ``finish_reason`` is the last.

    ``logprobs``: tokens that begin in it, where log-probabilities are wanted. ``trace``: its step, where that is
    wanted. ``reasoning`` and ``calls``: of a message that was taken apart; ``text`` is its content then.
    ``stop_string``: the one that ended it.
    """

    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    trace: dict[str, Any] | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    stop_string: str | None = None


class StopStrings:
    """Passes text on up to the first stop string, wherever its pieces begin and end.

    Text that could be the beginning of a stop string waits for the next text. The stop string that is complete first
    counts; of several that are complete at once, the longest.

    Args:
        strings: none of them empty.

    Attributes:
        found: the stop string that counted; None as long as there was none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._pending = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """The text that may be sent now."""
        if self.found is not None:
            return ""
        text = self._pending + text
        found = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            _, cut, self.found = min(found)
        else:
            cut = len(text) - max((self._overlap(text, each) for each in self._strings), default=0)
        self._pending = "" if found else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text that still waits, at the end of an answer."""
        rest, self._pending = self._pending, ""
        return rest

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Characters of the longest beginning of a stop string with which a text ends."""
        lengths = range(min(len(text), len(string) - 1), 0, -1)
        return next((length for length in lengths if text.endswith(string[:length])), 0)


class Echo(NamedTuple):
    """A prompt that an answer begins with: its text, how many of its tokens come as if they were generated, and whether
    anything comes after it."""

    text: str
    tokens: int
    goes_on: bool = True


class AnswerText:
    """One answer as it grows.

    Args:
        tokenizer: of the model.
        prompt: token ids, before the answer.
        stops: strings that end it.
        keep: see ``Detokenizer``.
        echo: of the prompt; None for an answer without it.
        hidden: tokens that end an answer, and are no part of it.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] | IntArray,
        stops: Sequence[str],
        keep: frozenset[int] = frozenset(),
        echo: Echo | None = None,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        self._hidden = hidden
        self._detokenizer = Detokenizer(tokenizer, prompt, keep)
        self._stops = StopStrings(stops)
        self._echo = echo.text if echo is not None else ""
        self._echoed = self.echoed = 0 if echo is None else echo.tokens
        """Tokens of the prompt that come as if they were generated."""
        self.goes_on = echo is None or echo.goes_on

    @property
    def stop_string(self) -> str | None:
        """The stop string that has come."""
        return self._stops.found

    def add(self, tokens: Iterable[int]) -> list[str]:
        """The text that each token adds; empty while a character is incomplete or may begin a stop string."""
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> str:
        text, self._echo = self._echo, ""
        if self._echoed or not self.goes_on:
            self._echoed -= 1
            return text
        if token in self._hidden:
            return text
        return text + "".join(self._stops.add(piece.text) for piece in self._detokenizer.add(token, False))

    def end(self) -> str:
        """The rest of the text."""
        if not self.goes_on:
            return ""
        rest = "".join(self._stops.add(piece.text) for piece in self._detokenizer.flush())
        return rest + self._stops.flush()


class LogprobStreamer:
    """Gives each token's log-probability once, with the text in which the token begins.

    The token that ends an answer is left out, and so are those that begin after a stop string.

    Args:
        spell: from a token to its bytes.
        request: keeps the log-probabilities.
        ends: tokens that end an answer.
        prompt: whose tokens are given, too; the first one has no log-probability.
        echoed: the prompt's text, with which the answer begins; marks may stand in it.
        goes_on: whether any tokens after the prompt are given.
    """

    def __init__(
        self,
        spell: TokenBytes,
        request: Request,
        ends: frozenset[int],
        prompt: Sequence[int] = (),
        echoed: str = "",
        goes_on: bool = True,
    ) -> None:
        self._text, self._goes_on = echoed, goes_on
        self._spell, self._request, self._ends = spell, request, ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: deque[TokenLogprob] = deque()
        self._read = self._characters = self._sent = 0
        self._echoed = max(0, len(prompt) - 1)
        if len(prompt):
            self._pending.append(TokenLogprob(spell(prompt[0]), None, (), 0))
            self._count_echoed(prompt[0])

    def take(self, characters: int, rest: bool) -> list[TokenLogprob]:
        """The tokens that begin in the next text.

        Args:
            characters: of the text that is sent now.
            rest: whether to give all that is left, because the answer has ended by itself.
        """
        self._sent += characters
        self._read_new()
        taken = []
        while self._pending and (rest or self._pending[0].offset < self._sent):
            taken.append(self._pending.popleft())
        return taken

    def _read_new(self) -> None:
        """Take what there is from the request, which would keep it to its end."""
        first, new = self._read, self._request.logprobs[:]
        del self._request.logprobs[: len(new)]
        self._read += len(new)
        for place, each in enumerate(new, first):
            if place == self._echoed:
                self._characters = len(self._text)
            if place < self._echoed:
                self._pending.append(self._spelled(each))
                self._count_echoed(each.token)
            elif self._goes_on and each.token not in self._ends:
                self._pending.append(self._spelled(each))
                self._count(each.token)

    def _count_echoed(self, token: int) -> None:
        """Go on in the echoed text, if the token stands there: one that the tokenizer has added does not, nor does the
        space that it has put before the text."""
        spelled = self._decoder.decode(self._spell(token))
        for piece in (spelled, spelled if self._characters else spelled.removeprefix(" ")):
            if self._text.startswith(piece, self._characters):
                self._characters += len(piece)
                return

    def _count(self, token: int) -> None:
        if not self._spell.skipped(token):
            self._characters += len(self._decoder.decode(self._spell(token)))

    def _spelled(self, one: Logprob) -> TokenLogprob:
        top = [(self._spell(token), max(logprob, IMPOSSIBLE_LOGPROB)) for token, logprob in one.top]
        return TokenLogprob(self._spell(one.token), max(one.logprob, IMPOSSIBLE_LOGPROB), top, self._characters)


def prompt_trace(request: Request, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """What was read of a prompt, and where it leaves the kept one of its namespace that begins most like it: from there
    or a little before it is read anew. Without ``differs_at`` it left none."""
    told: dict[str, Any] = {"tokens": request.prompt_length, "cached": request.cached_tokens}
    if (broken := request.prefix_break) is not None:
        told["differs_at"] = broken.position
        told |= {"kept": decode(broken.kept.tolist()), "given": decode(broken.given.tolist())}
    return told


def step_trace(commit: Commit, texts: Sequence[str], shared: bool = False) -> dict[str, Any]:
    """The trace of a step whose tokens added these texts. A character of several tokens comes with the last of them.
    The first step's seconds include the reading of the prompt.

    Where tenants draft from each other's texts (``shared``), it has no sources and counts: they would tell what others
    were answered.
    """
    tokens: list[dict[str, Any]] = [
        {"id": token, "text": text, "source": None if shared else Origin(origin).word}
        for token, text, origin in zip(commit.tokens, texts, commit.origins, strict=True)
    ]
    proposed, drafted = (None, None) if shared else (commit.proposed, commit.drafted)
    return {"tokens": tokens, "drafted": proposed, "accepted": drafted, "seconds": round(commit.seconds, 6)}
