"""An endpoint's audit as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from forerun import __version__
from forerun.audit.endpoint.cases import CASE_KINDS
from forerun.audit.endpoint.client import Json
from forerun.audit.endpoint.endpoint_audit import FORMS, VERDICTS, CaseComparison, EndpointReport, Variant

MEANINGS = {
    "equal": "the same text, calls, finish reason and log-probabilities",
    "rounding": "greedy, and the two tokens' log-probabilities are closer than rounding may bring them",
    "different": "any other difference",
    "unstable": "the reference differs from itself when asked again, so it cannot judge",
    "refused": "neither answers such a request",
}


def as_json(report: EndpointReport, strict: bool = False) -> Json:
    """Return the report as plain values."""
    return {
        "forerun": __version__,
        "audited": _variant(report.audited),
        "reference": _variant(report.reference),
        "twice": report.twice,
        "verdict": verdict(report),
        "passed": not report.failed(strict),
        "counts": {each: report.count(each) for each in VERDICTS},
        "comparisons": [_comparison(each) for each in report.comparisons],
    }


def as_markdown(report: EndpointReport) -> str:
    """Return the verdict, what was compared, a table by kind and form, and each difference."""
    parts = [
        "# Audit of a server",
        verdict(report),
        f"- audited: {_named(report.audited)}\n- reference: {_named(report.reference)}\n- drafts: {_drafts(report)}",
        _table(report),
        "\n".join(f"- **{name}**: {meaning}" for name, meaning in MEANINGS.items()),
    ]
    if differences := [each for each in report.comparisons if each.difference is not None]:
        parts += ["## Differences", "\n".join(map(_difference, differences))]
    if refusals := list(dict.fromkeys(_refusal(each) for each in report.comparisons if each.verdict == "refused")):
        parts += ["## Neither answers", "\n".join(refusals)]
    return "\n\n".join(parts) + "\n"


def verdict(report: EndpointReport) -> str:
    """Return the conclusion in a sentence or two."""
    compared = len(report.comparisons) - report.count("refused")
    if not compared:
        return "Nothing could be compared: every request was refused."
    of = f"of {compared} answers"
    if report.count("different"):
        conclusion = f"✗ {report.count('different')} {of} differ."
    elif report.count("rounding"):
        conclusion = f"✓ No answer differs by more than rounding ({report.count('rounding')} {of} by rounding)."
    elif report.count("equal"):
        conclusion = f"✓ {report.count('equal')} {of} are equal, and none differs."
    else:
        conclusion = "✗ Nothing could be judged."
    if report.count("unstable"):
        conclusion += f" The reference does not repeat itself in {report.count('unstable')} more."
    return conclusion


def _named(variant: Variant) -> str:
    fields = f" with `{json.dumps(variant.fields)}`" if variant.fields else ""
    return f"`{variant.model}` at {variant.endpoint.url}{fields}"


def _variant(variant: Variant) -> Json:
    return {"url": variant.endpoint.url, "model": variant.model, "fields": variant.fields}


def _comparison(one: CaseComparison) -> Json:
    case = {"kind": one.case.kind, "case": one.case.name, "form": one.form, "verdict": one.verdict}
    more = {
        "difference": None if one.difference is None else asdict(one.difference),
        "refusal": one.refusal,
        "drafted": one.drafted,
        "accepted": one.accepted,
    }
    sent = {"address": f"/v1/{one.case.address}", "body": one.case.body} if one.difference is not None else {}
    return case | {name: value for name, value in more.items() if value is not None} | sent


def _drafts(report: EndpointReport) -> str:
    counted = [each for each in report.comparisons if each.drafted is not None]
    if not counted:
        return "the server does not report how many tokens it drafted, so equal answers may have had no draft"
    drafted, accepted = (sum(getattr(each, name) or 0 for each in counted) for name in ("drafted", "accepted"))
    with_drafts = sum(bool(each.drafted) for each in counted)
    return f"{accepted:,} of {drafted:,} drafted tokens accepted, in {with_drafts} of {len(counted)} answers"


def _table(report: EndpointReport) -> str:
    rows = ["| kind | form | compared | " + " | ".join(VERDICTS) + " |", "|---|---|" + "---:|" * (1 + len(VERDICTS))]
    rows += [f"| {kind} | {form} | {_cells(group)} |" for kind, form, group in _groups(report)]
    return "\n".join(rows)


def _groups(report: EndpointReport) -> Iterator[tuple[str, str, list[CaseComparison]]]:
    for kind in CASE_KINDS:
        for form in FORMS:
            if group := [each for each in report.comparisons if (each.case.kind, each.form) == (kind, form)]:
                yield kind, form, group


def _cells(group: Sequence[CaseComparison]) -> str:
    counts = [sum(each.verdict == verdict for each in group) for verdict in VERDICTS]
    return " | ".join(str(count) if count else "·" for count in (len(group) - counts[-1], *counts))


def _difference(one: CaseComparison) -> str:
    found = one.difference
    assert found is not None
    gap = "not known" if found.margin is None else f"{found.margin:.3g}"
    where = (
        f"{found.part}, after {found.position} equal {'tokens' if found.part == 'log-probabilities' else 'characters'}"
    )
    texts = f"expected {_code(found.expected)}, got {_code(found.got)}"
    return f"- **{one.verdict}** {one.case.kind}, {one.case.name}, {one.form}: {where}: {texts}; margin {gap}"


def _refusal(one: CaseComparison) -> str:
    return f"- {one.case.kind}, {one.case.name}: {one.refusal}"


def _code(text: str) -> str:
    """Quote a string as code on one line; "the end" if it is empty."""
    quoted = json.dumps(text, ensure_ascii=False)
    return f"`` {quoted} ``" if text else "the end"
