"""The command line. Nothing here imports torch or transformers before a command runs."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Annotated

import typer

from forerun import __version__
from forerun.cli.audit_options import AuditOptions
from forerun.cli.bench_options import BenchOptions, DemoOptions, NeverSlowerOptions
from forerun.cli.commands import command, group, user_errors
from forerun.cli.compile_options import CompileOptions
from forerun.cli.generate_options import ChatOptions, GenerateOptions
from forerun.cli.rank_check import check_shared
from forerun.cli.serve_options import ServeOptions

app = typer.Typer(
    name="forerun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _forerun(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Hugging Face language models generate exactly the same text, faster."""
    with user_errors():
        check_shared(context.invoked_subcommand)


for name, options in (
    ("generate", GenerateOptions),
    ("chat", ChatOptions),
    ("serve", ServeOptions),
    ("audit", AuditOptions),
    ("demo", DemoOptions),
    ("compile", CompileOptions),
):
    command(app, name, options, f"forerun.cli.{name}")
_bench = group(app, "bench", BenchOptions, "forerun.cli.bench")
command(_bench, "never-slower", NeverSlowerOptions, "forerun.cli.slower_check")


def main() -> None:
    """Run the command line, and end the process without tearing its modules down: with torch and transformers, that
    costs a second of CPU time, a fifth of a short command's. Exit handlers run, except those registered before this."""
    status = 1  # a bug's; Python prints its traceback before it calls exit handlers
    atexit.register(lambda: _end(status))
    try:
        app()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


def _end(status: int) -> None:
    """End the process. If its output cannot be written, raise that error, so that Python reports it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
