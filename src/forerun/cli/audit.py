"""``forerun audit``: of a local model, or of a server."""

from __future__ import annotations

from forerun.cli.audit_options import AuditOptions


def run(options: AuditOptions) -> None:
    """Run the audit that the options select; only a model's imports torch."""
    if options.url is not None:
        from forerun.cli import server_audit

        server_audit.run(options)
    else:
        from forerun.cli import model_audit

        model_audit.run(options)
