"""Has texts read for chains, which need a cache of the prompt.

A long text is read as soon as that is expected to pay. A short one's cache takes a single pass, and waits until a chain
is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from forerun.core.request import Request
from forerun.kv.cache import READ_BLOCK, Cache


def is_short(request: Request) -> bool:
    """Whether its cache for chains takes a single pass."""
    return len(request) <= READ_BLOCK


class PromptReader(Protocol):
    """Reads prompts into caches of its own; see ``Drafter``."""

    def prefilled(self, request: Request, cache: Cache) -> None:
        """Begin with a prompt."""

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read a piece of it. Returns whether nothing is left."""


@dataclass(slots=True)
class _UnreadText:
    """A text that was not read for chains.

    Attributes:
        cache: the target's.
        pays: whether reading it was expected to pay.
        due: the text's length at which that is found out anew, in tokens.
    """

    cache: Cache
    pays: bool = False
    due: int = 0


class ChainPreparation:
    """Knows which texts are read for chains, and decides when others are.

    Whether reading pays takes longer to find out than looking up a draft. So that is done again when ``READ_BLOCK``
    tokens more are there; for a short text, when its answer has doubled.

    Args:
        reader: reads them.
        clock: gives seconds.
        pays: whether reading a text is expected to pay.
        took: called with a text that was read, and the seconds that it took.
        asks: whether a short text is only read if that pays, too.
    """

    def __init__(
        self,
        reader: PromptReader,
        clock: Callable[[], float],
        pays: Callable[[Request], bool],
        took: Callable[[Request, float], None],
        asks: bool,
    ) -> None:
        self._reader, self._clock, self._pays, self._took, self._asks = reader, clock, pays, took, asks
        self._unread: dict[int, _UnreadText] = {}  # by request
        self._seconds: dict[int, float] = {}  # of those that are being read

    def add(self, request: Request, cache: Cache) -> None:
        """A text whose prompt the target has read into ``cache``."""
        self._unread[request.id] = _UnreadText(cache)

    def unread(self, request: Request) -> bool:
        """Whether reading the text was not begun."""
        return request.id in self._unread

    def allows(self, requests: Sequence[Request]) -> bool:
        """Whether chains may be drafted for all of these: each is read, or can be at once.

        A short text is read for the sake of others that are, too. A long one is begun here, if that pays.
        """
        begun = not all(map(self.unread, requests))
        allowed = [self._allows(request) or (begun and is_short(request)) for request in requests]  # all are decided on
        return all(allowed)

    def _allows(self, request: Request) -> bool:
        text, short = self._unread.get(request.id), is_short(request)
        if text is None or (short and not self._asks):
            return True
        if len(request) >= text.due:
            answer = len(request) - request.prompt_length
            text.due = len(request) + (answer + 1 if short else READ_BLOCK)
            text.pays = self._pays(request)
            if text.pays and not short:
                self.start([request])
        return text.pays

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to read those that are unread; ``catch_up`` goes on."""
        for request in requests:
            if (text := self._unread.pop(request.id, None)) is not None:
                self._seconds[request.id] = 0.0
                with self._timing(request):
                    self._reader.prefilled(request, text.cache)

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read a piece of the text, if that was begun. Returns whether nothing is left to read."""
        if request.id in self._seconds:
            with self._timing(request):
                ready = self._reader.catch_up(request, tokens)
            if ready:
                self._took(request, self._seconds.pop(request.id))
        return request.id not in self._seconds

    @contextmanager
    def _timing(self, request: Request) -> Iterator[None]:
        """Count the time as reading this text."""
        began = self._clock()
        yield
        self._seconds[request.id] += self._clock() - began

    def finish(self, request: Request) -> None:
        """Forget a text."""
        self._unread.pop(request.id, None)
        self._seconds.pop(request.id, None)
