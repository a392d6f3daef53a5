"""Turn tokens into whole characters up to a stop string, log-probabilities, and traces."""

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
"""OpenAI's finish reasons; errors have none."""
IMPOSSIBLE_LOGPROB = -9999.0
"""OpenAI's number for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer with its log-probability."""

    spelling: bytes
    logprob: float | None  # None for the very first token
    top: Sequence[tuple[bytes, float]]  # the likeliest tokens at its position
    offset: int  # its start, in characters of the answer


@dataclass(frozen=True)
class Delta:
    """New text of one choice; the last one has a ``finish_reason``."""

    index: int
    text: str  # of a parsed message, the content
    finish_reason: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None  # of tokens that begin in the text
    trace: dict[str, Any] | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    stop_string: str | None = None


class StopStrings:
    """A filter that ends text before the first complete stop string, ``found``, and holds back what may begin one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._pending = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        if self.found is not None:
            return ""
        text = self._pending + text
        found = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            _, cut, self.found = min(found)  # of several that end together, the longest
        else:
            cut = len(text) - max((self._overlap(text, each) for each in self._strings), default=0)
        self._pending = "" if found else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        rest, self._pending = self._pending, ""
        return rest

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        lengths = range(min(len(text), len(string) - 1), 0, -1)
        return next((length for length in lengths if text.endswith(string[:length])), 0)


class Echo(NamedTuple):
    """A prompt that begins an answer."""

    text: str
    tokens: int  # how many of its tokens count as generated
    continues: bool = True  # whether more follows


class AnswerText:
    """One answer as it grows. ``stops`` and ``hidden`` tokens end it unseen; for ``keep``, see ``Detokenizer``."""

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
        self._echo, self.echoed, self.continues = echo or Echo("", 0)
        self._echoes = self.echoed

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def add(self, tokens: Iterable[int]) -> list[str]:
        """Return the characters that each token adds; empty while one is incomplete or may begin a stop string."""
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> str:
        text, self._echo = self._echo, ""
        if self._echoes or not self.continues:
            self._echoes -= 1
            return text
        if token in self._hidden:
            return text
        return text + "".join(self._stops.add(piece.text) for piece in self._detokenizer.add(token, False))

    def end(self) -> str:
        if not self.continues:
            return ""
        rest = "".join(self._stops.add(piece.text) for piece in self._detokenizer.flush())
        return rest + self._stops.flush()


class LogprobStreamer:
    """A stream of each token's log-probability, with the characters in which the token begins, including the ``prompt``
    of an ``echo``, with its special tokens, and without tokens that end an answer or begin after a stop string."""

    def __init__(
        self, spell: TokenBytes, request: Request, ends: frozenset[int], echo: Echo | None, prompt: Sequence[int]
    ) -> None:
        self._text, _, self._continues = echo or Echo("", 0)
        self._spell, self._request, self._ends = spell, request, ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: deque[TokenLogprob] = deque()
        self._read = self._characters = self._sent = 0
        self._echoed = max(0, len(prompt) - 1)
        if len(prompt):
            self._pending.append(TokenLogprob(spell(prompt[0]), None, (), 0))
            self._count_echoed(prompt[0])

    def advance(self, characters: int, rest: bool) -> list[TokenLogprob]:
        """Return the tokens that begin in the next ``characters`` of the answer; with ``rest``, all that are left."""
        self._sent += characters
        self._read_new()
        found = []
        while self._pending and (rest or self._pending[0].offset < self._sent):
            found.append(self._pending.popleft())
        return found

    def _read_new(self) -> None:
        """Move new log-probabilities out of the request, which would keep them to its end."""
        first, new = self._read, self._request.logprobs[:]
        del self._request.logprobs[: len(new)]
        self._read += len(new)
        for place, each in enumerate(new, first):
            if place == self._echoed:
                self._characters = len(self._text)
            if place < self._echoed:
                self._pending.append(self._spelled(each))
                self._count_echoed(each.token)
            elif self._continues and each.token not in self._ends:
                self._pending.append(self._spelled(each))
                if not self._spell.skipped(each.token):
                    self._characters += len(self._decoder.decode(self._spell(each.token)))

    def _count_echoed(self, token: int) -> None:
        """Advance in the echoed characters, except for tokens and a first space that the tokenizer has added."""
        spelled = self._decoder.decode(self._spell(token))
        for piece in (spelled, spelled if self._characters else spelled.removeprefix(" ")):
            if self._text.startswith(piece, self._characters):
                self._characters += len(piece)
                return

    def _spelled(self, one: Logprob) -> TokenLogprob:
        top = [(self._spell(token), max(logprob, IMPOSSIBLE_LOGPROB)) for token, logprob in one.top]
        return TokenLogprob(self._spell(one.token), max(one.logprob, IMPOSSIBLE_LOGPROB), top, self._characters)


def prompt_trace(request: Request, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Trace how much of a prompt was cached, and where it differs from the most similar one kept in its namespace."""
    trace: dict[str, Any] = {"tokens": request.prompt_length, "cached": request.cached_tokens}
    if (broken := request.prefix_break) is not None:
        trace["differs_at"] = broken.position
        trace |= {"kept": decode(broken.kept.tolist()), "given": decode(broken.given.tolist())}
    return trace


def step_trace(commit: Commit, texts: Sequence[str], shared: bool = False) -> dict[str, Any]:
    """Trace a step whose tokens added ``texts``; the first step's seconds include prefill. If tenants share drafts
    (``shared``), leave out sources and counts: they would reveal others' answers."""
    tokens: list[dict[str, Any]] = [
        {"id": token, "text": text, "source": None if shared else Origin(origin).word}
        for token, text, origin in zip(commit.tokens, texts, commit.origins, strict=True)
    ]
    proposed, drafted = (None, None) if shared else (commit.proposed, commit.drafted)
    return {"tokens": tokens, "drafted": proposed, "accepted": drafted, "seconds": round(commit.seconds, 6)}
