"""From a dataclass of options to a command."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from forerun.cli.errors import user_errors
from forerun.cli.log import shown_log


def command(app: typer.Typer, name: str, options: type[Any], module: str) -> None:
    """Add a command. Its ``run(options)`` is in this module, which is imported only when the command is called."""
    app.command(name)(_invoker(options, module))


def _invoker(options: type[Any], module: str) -> Callable[..., None]:
    def invoke(**given: Any) -> None:
        with user_errors(given["debug"]), shown_log():
            checked = options(**given)
            importlib.import_module(module).run(checked)

    invoke.__doc__ = options.__doc__
    hints = get_type_hints(options, include_extras=True)  # resolves a base's fields in the base's module
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    invoke.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return invoke
