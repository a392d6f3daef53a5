"""Compare a server's answers with and without speculation: two servers, two settings of one, or one queried twice.

Each case is sent unstreamed, streamed, and together with others. After a difference the reference is queried again: if
it does not repeat itself, it cannot judge; else log-probabilities show how close the two tokens were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from forerun.audit.endpoint.cases import Case
from forerun.audit.endpoint.client import Endpoint, EndpointAnswer, Json
from forerun.audit.endpoint.difference import Difference, first_difference, margin

Form = Literal["whole", "streamed", "together"]
FORMS: tuple[Form, ...] = ("whole", "streamed", "together")
Verdict = Literal["equal", "rounding", "different", "unstable", "refused"]
VERDICTS: tuple[Verdict, ...] = ("equal", "rounding", "different", "unstable", "refused")
ROUNDING = 0.125
"""Gap of log-probabilities that rounding may close: one step of a bfloat16 logit between 16 and 32."""
AT_ONCE = 8
"""Concurrent requests. A server may refuse more."""
CONTROLS = 2
"""Repetitions of the reference after a difference."""


@dataclass(frozen=True)
class Variant:
    """A server, its model, and fields added to each request."""

    endpoint: Endpoint
    model: str
    fields: Json = field(default_factory=dict)

    def ask(self, case: Case, streamed: bool = False, scored: bool = False) -> EndpointAnswer:
        body = {"model": self.model, **(case.scored() if scored else case.body), **self.fields}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return self.endpoint.ask(case.address, body)

    def together(self, cases: Sequence[Case]) -> list[EndpointAnswer]:
        """Answer all cases, ``AT_ONCE`` at a time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.ask, cases))


@dataclass(frozen=True)
class CaseComparison:
    """A case in one form. ``difference`` is None for equal answers; ``refusal`` says why neither answered. ``drafted``
    and ``accepted`` are the audited answer's; None if the server reports none."""

    case: Case
    form: Form
    verdict: Verdict
    difference: Difference | None = None
    refusal: str | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class EndpointReport:
    """The result of an audit."""

    audited: Variant
    reference: Variant
    comparisons: Sequence[CaseComparison]

    def count(self, verdict: Verdict) -> int:
        return sum(each.verdict == verdict for each in self.comparisons)

    @property
    def twice(self) -> bool:
        """Whether one server was queried twice, without any change."""
        return self.audited == self.reference

    def failed(self, strict: bool = False) -> bool:
        """Return whether an answer differs (unless ``strict``, by more than rounding), or none could be compared."""
        bad = self.count("different") + (self.count("rounding") + self.count("unstable") if strict else 0)
        return bad > 0 or not self.count("equal") + self.count("rounding")


def audit_endpoint(
    audited: Variant,
    reference: Variant,
    cases: Sequence[Case],
    rounding: float = ROUNDING,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> EndpointReport:
    """Compare all cases in all forms: ``audited`` with speculation, ``reference`` without; two equal ones query one
    server twice. ``rounding``: gap of log-probabilities to allow. ``progress``: called with comparisons done and to do,
    and the current one."""
    run = _CaseRuns(audited, reference, cases, rounding)
    total, found = len(FORMS) * len(cases), list[CaseComparison]()
    for form in ("whole", "streamed"):
        for case in cases:
            progress(len(found), total, f"{case.kind}: {case.name}, {form}")
            found.append(run.compare(case, form))
    progress(len(found), total, f"{AT_ONCE} at once")
    found += run.compare_together()
    return EndpointReport(audited, reference, found)


class _CaseRuns:
    def __init__(self, audited: Variant, reference: Variant, cases: Sequence[Case], rounding: float) -> None:
        self.audited, self.reference, self.cases, self.rounding = audited, reference, cases, rounding
        self._expected: list[EndpointAnswer] = []  # unstreamed answers, in the order of the cases

    def compare(self, case: Case, form: Form) -> CaseComparison:
        streamed = form == "streamed"
        expected = self.reference.ask(case, streamed)
        if form == "whole":
            self._expected.append(expected)
        got = self.audited.ask(case, streamed)
        return self._judge(case, form, expected, got, lambda: self.reference.ask(case, streamed))

    def compare_together(self) -> list[CaseComparison]:
        """Send all cases concurrently, and compare each with the reference's answer to it alone."""
        answers = self.audited.together(self.cases)
        controls: dict[int, EndpointAnswer] = {}

        def control(index: int) -> EndpointAnswer:
            if not controls:
                controls.update(enumerate(self.reference.together(self.cases)))
            return controls[index]

        return [
            self._judge(case, "together", expected, got, partial(control, index))
            for index, (case, expected, got) in enumerate(zip(self.cases, self._expected, answers, strict=True))
        ]

    def _judge(
        self, case: Case, form: Form, expected: EndpointAnswer, got: EndpointAnswer, again: Callable[[], EndpointAnswer]
    ) -> CaseComparison:
        """Judge two answers; ``again`` queries the reference once more."""
        judged = partial(CaseComparison, case, form, drafted=got.drafted, accepted=got.accepted)
        if expected.error and got.error:
            return CaseComparison(case, form, "refused", refusal=got.error)
        difference = first_difference(expected, got)
        if difference is None:
            return judged("equal")
        twice = self.audited == self.reference
        if not twice and any(first_difference(expected, again()) for _ in range(CONTROLS)):
            return judged("unstable", difference)
        if difference.margin is None and not (expected.error or got.error):
            scored = self.reference.ask(case, scored=True), self.audited.ask(case, scored=True)
            difference = replace(difference, margin=margin(difference, got, *scored))
        near = case.greedy and difference.margin is not None and difference.margin <= self.rounding
        return judged("rounding" if near else "different", difference)
