"""``forerun audit --url``: compare a server's answers with and without speculation."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from forerun.audit.endpoint.cases import CASE_KINDS, CasePlan, read_requests
from forerun.audit.endpoint.client import Endpoint, Json
from forerun.audit.endpoint.endpoint_audit import EndpointReport, Variant, audit_endpoint
from forerun.audit.endpoint.endpoint_report import as_json, as_markdown
from forerun.cli.audit_options import AuditOptions
from forerun.cli.commands import FAILED
from forerun.cli.prompt_input import read_prompts
from forerun.cli.terminal import progress_bar, show_report, stderr

NO_DRAFTS: Json = {"forerun": {"drafter": "none"}}
"""The field that makes Forerun's server answer without drafts."""


def run(options: AuditOptions) -> None:
    """Run the audit; exit with status 1 if an answer differs by more than rounding, or nothing could be compared."""
    cases = _plan(options).cases()
    audited, reference = _variants(options)
    with progress_bar(stderr(), "auditing") as progress:
        report = audit_endpoint(audited, reference, cases, options.rounding, progress)
    written = [] if options.out is None else _write(report, options.out, options.strict)
    show_report(as_json(report, options.strict) if options.json else as_markdown(report), written)
    if report.failed(options.strict):
        raise typer.Exit(FAILED)


def _plan(options: AuditOptions) -> CasePlan:
    own = [] if options.requests is None else read_requests(options.requests)
    kinds = [kind for kind in CASE_KINDS if kind in (options.kind or CASE_KINDS)]
    prompts = read_prompts(options.prompt, options.prompt_file)
    return CasePlan(
        kinds, prompts, options.max_new_tokens, options.seeds, options.temperature, options.long_characters, own
    )


def _variants(options: AuditOptions) -> tuple[Variant, Variant]:
    assert options.url is not None
    endpoint = Endpoint(options.url, options.api_key)
    model = _model(endpoint, options.name)
    audited = Variant(endpoint, str(model["id"]), _fields(options.fields, "--fields"))
    fields = _fields(options.against_fields, "--against-fields")
    if options.against is not None:
        other = Endpoint(options.against, options.api_key)
        return audited, Variant(other, str(_model(other, options.name)["id"]), fields)
    if options.against_fields is None and options.fields is None and "forerun" in model:
        fields = NO_DRAFTS
    return audited, Variant(endpoint, audited.model, fields)


def _model(endpoint: Endpoint, name: str | None) -> Json:
    """Return the model called ``name``, or the first that the server lists; raise ValueError if there is neither."""
    try:
        models = endpoint.models()
    except ValueError:
        if name is None:
            raise
        models = []
    if name is not None:
        return next((each for each in models if each["id"] == name), {"id": name})
    if not models:
        raise ValueError(f"{endpoint.url} lists no model; name one with --name")
    return models[0]


def _fields(text: str | None, flag: str) -> Json:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} is {text!r}, which is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'{flag} is {text!r}; it must be an object, such as {{"temperature": 0}}')
    return found


def _write(report: EndpointReport, folder: Path, strict: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "audit.json", folder / "audit.md"]
    files[0].write_text(json.dumps(as_json(report, strict), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    files[1].write_text(as_markdown(report), encoding="utf-8")
    return files
