"""From a dataclass of options to a command."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            with _no_collection():
                imported = importlib.import_module(module)
            imported.run(checked)

    invoke.__doc__ = options.__doc__
    hints = get_type_hints(options, include_extras=True)  # resolves a base's fields in the base's module
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    invoke.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return invoke


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context in which Python looks for no garbage: it finds none in what is imported, and takes a quarter of the
    time (torch, transformers and numba: 4.5 seconds of a busy processor, 3.4 without)."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
