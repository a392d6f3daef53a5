"""What a stream says of each step, if its request wants to know: the tokens, who drafted each, and the time."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from forerun.core.origin import Origin
from forerun.engine.commit import Commit


class TracedToken(BaseModel):
    """A token. ``text``: what it added to the answer; a character of several tokens comes with its last. ``source``:
    ``target`` if nobody drafted it, or who did: ``text``, ``earlier``, ``model``, ``self``, ``jacobi``, ``forced``,
    ``drafter``."""

    id: int
    text: str
    source: str


class Trace(BaseModel):
    """A step. ``drafted``: tokens of the draft that it verified. ``accepted``: of these. ``seconds``: that it took; the
    first one's begin when the request was admitted, so the reading of its prompt is part of them."""

    tokens: list[TracedToken]
    drafted: int
    accepted: int
    seconds: float


def trace_of(commit: Commit, texts: Sequence[str]) -> Trace:
    """A step that added tokens with these texts."""
    tokens = [
        TracedToken(id=token, text=text, source=Origin(origin).word)
        for token, text, origin in zip(commit.tokens, texts, commit.origins, strict=True)
    ]
    return Trace(tokens=tokens, drafted=commit.proposed, accepted=commit.drafted, seconds=round(commit.seconds, 6))
