"""From tokens to text as it is sent: whole characters, without the string that ended it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from forerun.core.request import FinishReason, Request
from forerun.models.text.detokenize import Detokenizer
from forerun.server.token_logprobs import TokenLogprob
from forerun.server.trace import Trace

Finish = Literal["stop", "length"]
FINISH: dict[FinishReason, Finish] = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's words for why a text ended; an error is none of them."""


@dataclass(frozen=True)
class Delta:
    """What is new of one of a request's texts; with ``finish_reason`` there comes no more.

    ``told``: the tokens that begin in it, where their log-probabilities are asked for. ``trace``: of the step that gave
    it, if the request wants to know.
    """

    index: int
    text: str
    finish_reason: Finish | None = None
    told: Sequence[TokenLogprob] | None = None
    trace: Trace | None = None


class StopStrings:
    """Passes text on up to the first stop string, wherever its pieces begin and end.

    Text that could be the beginning of a stop string waits for what comes next. Of several stop strings, the one that
    is complete first counts; of those complete at once, the one that begins first.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What may be sent now."""
        if not self._strings:
            return text
        sent = ""
        for character in text:
            sent += self._add(character)
        return sent

    def flush(self) -> str:
        """What was held back, at the end of a text."""
        rest, self._held = self._held, ""
        return rest

    def _add(self, character: str) -> str:
        if self.stopped:
            return ""
        self._held += character
        complete = [len(string) for string in self._strings if self._held.endswith(string)]
        if complete:
            self.stopped = True
            sent, self._held = self._held[: -max(complete)], ""
            return sent
        keep = max(self._beginning(string) for string in self._strings)
        end = len(self._held) - keep
        sent, self._held = self._held[:end], self._held[end:]
        return sent

    def _beginning(self, string: str) -> int:
        """The longest beginning of a stop string, in characters, with which the held text ends."""
        lengths = range(min(len(self._held), len(string) - 1), 0, -1)
        return next((length for length in lengths if self._held.endswith(string[:length])), 0)


class Writer:
    """One text as it grows.

    Args:
        tokenizer: of the model.
        request: whose text it is.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Any, request: Request, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.stopped

    def add(self, tokens: Iterable[int]) -> list[str]:
        """The text that each token adds; none, as long as a character is incomplete or may begin a stop string."""
        return [
            "".join(self._stops.add(piece.text) for piece in self._detokenizer.add(token, False)) for token in tokens
        ]

    def end(self) -> str:
        """The rest of the text."""
        rest = "".join(self._stops.add(piece.text) for piece in self._detokenizer.flush())
        return rest + self._stops.flush()


class StopWatch:
    """Ends a request at the token that completes a stop string; for ``Request.stopping``.

    It looks at the text that was generated, not at the prompt.

    Args:
        writer: of this request, for this alone.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __call__(self, ids: torch.Tensor) -> bool:
        """Told the ids ``[1, t]`` after every token, whether the text ends with it."""
        self._writer.add([int(ids[0, -1])])
        return self._writer.stopped
