"""One name, one meaning: what a reader searches for is defined in one place of the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import parsed

import forerun

SOURCE = Path(forerun.__file__).parent
COUNTERPARTS = {"__init__", "__main__", "audit", "decoder_ops", "linear"}
"""File names that occur twice because one file is the other's counterpart: a command's, or a GPU's."""


def modules() -> dict[Path, ast.Module]:
    return {path: parsed(path) for path in sorted(SOURCE.rglob("*.py"))}


def classes(tree: ast.Module) -> Iterator[str]:
    return (node.name.removeprefix("_") for node in tree.body if isinstance(node, ast.ClassDef))


def constants(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        assigns = isinstance(node, ast.Assign)
        targets = node.targets if assigns else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (name.id for name in names if isinstance(name, ast.Name) and name.id.isupper())


@pytest.mark.parametrize("kind", [classes, constants])
def test_no_class_and_no_constant_is_defined_in_two_modules(kind):
    places = defaultdict(set)
    for path, tree in modules().items():
        for name in kind(tree):
            places[name].add(str(path.relative_to(SOURCE)))
    assert {name: sorted(where) for name, where in places.items() if len(where) > 1} == {}


def test_a_file_name_occurs_twice_only_where_one_file_is_the_others_counterpart():
    places = defaultdict(set)
    for path in modules():
        places[path.stem].add(str(path.relative_to(SOURCE)))
    assert {n: sorted(w) for n, w in places.items() if len(w) > 1 and n not in COUNTERPARTS} == {}


def test_public_classes_and_functions_say_what_they_are_for():
    """A method may leave it to the one that it overrides, in a class of the package or of another library."""
    own = {name for tree in modules().values() for name in classes(tree)}
    said = {f.name for t in modules().values() for c in ast.walk(t) if isinstance(c, ast.ClassDef) for f in c.body
            if isinstance(f, ast.FunctionDef) and ast.get_docstring(f)}  # fmt: skip
    missing = [
        f"{path.relative_to(SOURCE)}:{method.lineno} {node.name}.{method.name}"
        for path, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if all(isinstance(base, ast.Name) and base.id in own for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not ast.get_docstring(method) and method.name not in said
    ]
    assert missing == []
