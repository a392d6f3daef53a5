"""Calls between compiled functions by symbol, so that a large function is compiled once.

numba copies a function's code into every caller and optimises it again, so that nested large functions grow many times
over. So callers only declare a large function, under a name that is equal in all processes.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import llvmlite.binding as llvm

LARGE = 200
"""LLVM instructions from which a function is called rather than inlined."""

code_of = operator.attrgetter("library")


class Symbol(NamedTuple):
    """A compiled function with a signature: its name in machine code, where Python finds it, and its argument types."""

    name: str
    module: str
    function: str
    arguments: tuple[Any, ...]


_loaded: dict[str, Symbol] = {}
"""Symbols whose machine code this process has loaded, by name."""


def called_apart(result: Any) -> bool:
    """Return whether callers never inline the function of a numba compile result."""
    if "apart" not in result.metadata:
        result.metadata["apart"] = _is_for_python(result) or (_can_be_found(result) and _size(result) >= LARGE)
    return bool(result.metadata["apart"])


def call_if_large(result: Any, target_context: Any) -> None:
    """Let later callers call this function, if it is large, instead of inlining it."""
    if not called_apart(result):
        return
    symbol, described = _symbol_of(result), copy.copy(result.fndesc)
    llvm.add_symbol(symbol.name, code_of(result).get_pointer_to_function(described.mangled_name))
    described.mangled_name = symbol.name
    target_context.remove_user_function(result.entry_point)
    target_context.insert_user_function(result.entry_point, described)
    _loaded[symbol.name] = symbol


def needed_by(module: Any) -> list[Symbol]:
    """Return the symbols that an LLVM module calls."""
    return [_loaded[each.name] for each in module.functions if each.is_declaration and each.name in _loaded]


def load(symbols: Iterable[Symbol]) -> None:
    """Load or compile functions."""
    for name, module, function, arguments in symbols:
        if name not in _loaded:
            operator.attrgetter(function)(import_module(module)).inner.compile(arguments)


def _symbol_of(result: Any) -> Symbol:
    described = result.fndesc
    module, function, arguments = described.modname, described.qualname, tuple(result.signature.args)
    digest = hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]
    return Symbol(f"{module}.{function}.{digest}", module, function, arguments)


def _is_for_python(result: Any) -> bool:
    return result.fndesc.llvm_cpython_wrapper_name in {each.name for each in code_of(result)._final_module.functions}


def _can_be_found(result: Any) -> bool:
    return "<locals>" not in result.fndesc.qualname


def _size(result: Any) -> int:
    function = code_of(result).get_function(result.fndesc.mangled_name)
    return sum(1 for block in function.blocks for _ in block.instructions)
