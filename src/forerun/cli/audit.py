"""``forerun audit``: of a model here, or of a server somewhere."""

from __future__ import annotations

from forerun.cli.options import AuditOptions


def run(options: AuditOptions) -> None:
    """Run the audit that the options are for; only that of a model imports torch."""
    if options.url is not None:
        from forerun.cli import server_audit

        server_audit.run(options)
    else:
        from forerun.cli import model_audit

        model_audit.run(options)
