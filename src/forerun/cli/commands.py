"""Make commands from dataclasses of options. Users' errors become a line on stderr and status 2; bugs raise."""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

import typer

from forerun.cli.log import shown_log
from forerun.cli.options import flag_of
from forerun.cli.terminal import stderr, working

FAILED, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses; ``FAILED`` is for failed checks, and for a server that fails while running."""


def command(app: typer.Typer, name: str, options: type[Any], module: str) -> None:
    """Add a command. ``module``, with its ``run(options)``, is imported only when the command is called."""
    app.command(name)(_invoker(options, module))


def group(app: typer.Typer, name: str, options: type[Any], module: str) -> typer.Typer:
    """Add a command that also has subcommands."""
    below = typer.Typer(invoke_without_command=True)
    below.callback()(_invoker(options, module, with_context=True))
    app.add_typer(below, name=name)
    return below


def _only_below(context: typer.Context) -> bool:
    """Return whether a subcommand was called; raise ValueError for options before its name, which it would ignore."""
    if context.invoked_subcommand is None:
        return False
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{context.info_name} {context.invoked_subcommand}: give its options after its name")
    return True


def _invoker(options: type[Any], module: str, with_context: bool = False) -> Callable[..., None]:
    def invoke(click_context: typer.Context | None = None, **values: Any) -> None:
        with user_errors(values["debug"]), shown_log():
            if click_context is not None and _only_below(click_context):
                return
            _check_finite(values)
            valid = options(**values)
            with working(stderr(), "loading PyTorch"), _imports():
                imported = importlib.import_module(module)
            imported.run(valid)

    invoke.__doc__ = options.__doc__
    hints = get_type_hints(options, include_extras=True)  # resolves a base's fields in the base's module
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    if with_context:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.insert(0, inspect.Parameter("click_context", kind, annotation=typer.Context))
    invoke.__annotations__ = {}  # typer would prefer them to the signature
    invoke.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return invoke


def _check_finite(values: Mapping[str, Any]) -> None:
    """Raise ValueError for ``nan`` and infinities: range checks miss them."""
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{flag_of(name)} is {each}; it must be a finite number")


@contextmanager
def _imports() -> Iterator[None]:
    """Exclude what is imported within this context from garbage collection: there is none to find. This makes imports a
    quarter faster (torch, transformers and numba: 3.4 instead of 4.5 seconds on a busy processor)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # without this, native libraries report leaks at exit
        gc.enable()


@contextmanager
def user_errors(debug: bool = False) -> Iterator[None]:
    """Turn errors caused by users into an exit; with ``debug``, raise them unchanged."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # stdout's reader is gone: discard the buffer, instead of failing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except (ValueError, NotImplementedError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(USER_ERROR) from None


def one_line(error: BaseException) -> str:
    """Join an error's message into one line; file errors start with the file."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    return " ".join(message.split()) or type(error).__name__
