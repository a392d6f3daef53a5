"""Where two answers first differ, and how close the two tokens were there."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.audit.endpoint.client import EndpointAnswer, TokenScore

SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers.

    Attributes:
        part: of the answer, such as ``text``.
        position: characters, or tokens for log-probabilities, that are equal before it.
        expected, got: what follows in each; empty at the end.
        margin: gap of the two tokens' log-probabilities by the reference; for log-probabilities, the largest
            difference. None if unknown.
    """

    part: str
    position: int
    expected: str
    got: str
    margin: float | None = None


def first_difference(expected: EndpointAnswer, got: EndpointAnswer) -> Difference | None:
    """Return the first difference; None for equal answers."""
    if expected.error != got.error:
        return Difference("answer", 0, expected.error or "an answer", got.error or "an answer")
    ours, theirs = expected.parts, got.parts
    for part in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(part, ""), theirs.get(part, "")
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return Difference(part, at, a[at : at + SHOWN_CHARACTERS], b[at : at + SHOWN_CHARACTERS])
    return _score_difference(expected, got)


def _score_difference(expected: EndpointAnswer, got: EndpointAnswer) -> Difference | None:
    if len(expected.scores) != len(got.scores):
        counts = f"{len(expected.scores)} tokens", f"{len(got.scores)} tokens"
        return Difference("log-probabilities", min(len(expected.scores), len(got.scores)), *counts)
    pairs = list(zip(expected.scores, got.scores, strict=True))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    a, b = pairs[at]
    margin = max(abs(one.logprob - other.logprob) for one, other in pairs)
    return Difference("log-probabilities", at, f"{a.spelling!r} {a.logprob}", f"{b.spelling!r} {b.logprob}", margin)


def margin(
    difference: Difference, got: EndpointAnswer, reference: EndpointAnswer, audited: EndpointAnswer
) -> float | None:
    """Return the gap of the two tokens at the first difference by the reference's log-probabilities, or a lower bound
    if a token is not listed. ``got`` differs; ``reference`` and ``audited`` answer the same requests with
    log-probabilities."""
    pairs = enumerate(zip(reference.scores, audited.scores, strict=False))
    parted = next(((i, b.spelling) for i, (a, b) in pairs if a.spelling != b.spelling), None)
    if parted is not None:
        return _gap(reference.scores[parted[0]], parted[1])
    return _gap_in_text(difference, got, reference) if difference.part == "text" else None


def _gap_in_text(difference: Difference, got: EndpointAnswer, reference: EndpointAnswer) -> float | None:
    """Align tokens with the text to find the gap, if answers with log-probabilities do not differ."""
    if reference.text[: difference.position] != got.text[: difference.position]:
        return None
    differs, place = len(got.text[: difference.position].encode()), 0
    for score in reference.scores:
        if place + len(score.spelling) > differs:
            rest = got.text.encode()[place:]
            others = [each for each in score.top if each and each != score.spelling and rest.startswith(each)]
            return _gap(score, max(others, key=len, default=b""))
        place += len(score.spelling)
    return None


def _gap(score: TokenScore, other: bytes) -> float | None:
    if not score.top:
        return None
    return abs(score.logprob - score.top.get(other, min(score.top.values())))
