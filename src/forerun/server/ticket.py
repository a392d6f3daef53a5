"""A request on its way through the server: waiting, running, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from forerun.core.request import Request
from forerun.engine.commit import Commit

log = logging.getLogger(__name__)

Ending = Literal["finished", "cancelled", "deadline", "error"]


@dataclass(eq=False)
class Ticket:
    """A submitted request.

    Both callbacks run in the scheduler's thread, and must return at once.

    Attributes:
        request: what is decoded.
        tenant: whose it is; tenants get equal shares.
        on_commit: called with each step's tokens.
        on_end: called once, with how it ended; ``request.error`` says more about an error.
        deadline: by ``time.monotonic``, when it is ended with what it has by then; None for never.
        needs: bytes of keys and values that it takes, all in all.
        tokens: of its text at its longest, drafts included.
        drafting: of the bytes, those of draft levels.
        submitted, admitted, ended: by ``time.monotonic``; None before.
        ending: how it ended.
    """

    request: Request
    tenant: str
    on_commit: Callable[[Commit], None]
    on_end: Callable[[Ending], None]
    deadline: float | None = None
    needs: int = 0
    tokens: int = 0
    drafting: int = 0
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    ended: float | None = None
    ending: Ending | None = None

    def end(self, how: Ending) -> None:
        """Tell its client, once; one that fails must not stop the others."""
        if self.ending is None:
            self.ending, self.ended = how, time.monotonic()
            try:
                self.on_end(how)
            except Exception:
                log.exception("a client cannot be told that its request has ended")
