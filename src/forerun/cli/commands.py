"""From a dataclass of options to a command, or to a command with subcommands."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from forerun.cli.errors import user_errors
from forerun.cli.log import shown_log


def command(app: typer.Typer, name: str, options: type[Any], module: str | None = None) -> None:
    """Add a command. Its ``run(options)`` is in the module of that name, or in the one given; it is imported only when
    the command is called."""
    app.command(name)(_invoker(options, module or name))


def group(app: typer.Typer, name: str, options: type[Any]) -> typer.Typer:
    """Add a command with subcommands; without a subcommand it does its own work."""
    own = typer.Typer(rich_markup_mode="rich")
    invoke = _invoker(options, name)

    def call(context: typer.Context, **given: Any) -> None:
        if context.invoked_subcommand is None:
            invoke(**given)
            return
        with user_errors(given["debug"]):
            _check_none_given(context)

    signature = inspect.signature(invoke)
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__doc__ = options.__doc__
    call.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
    own.callback(invoke_without_command=True)(call)
    app.add_typer(own, name=name)
    return own


def _check_none_given(context: typer.Context) -> None:
    """Refuse a command's own options before a subcommand, which would not get them.

    Raises:
        ValueError: with the options.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    named = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [named[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise ValueError(f"{', '.join(given)} is before {context.invoked_subcommand}; put it behind")


def _invoker(options: type[Any], module: str) -> Callable[..., None]:
    def invoke(**given: Any) -> None:
        with user_errors(given["debug"]), shown_log():
            checked = options(**given)
            importlib.import_module(f"forerun.cli.{module}").run(checked)

    invoke.__doc__ = options.__doc__
    hints = get_type_hints(options, include_extras=True)  # resolves a base's fields in the base's module
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    invoke.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return invoke
