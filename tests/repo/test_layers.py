"""Imports run downwards only, and transformers is imported where the layout says."""

import ast
import re
from pathlib import Path

from support.sources import nodes, parsed

import forerun

SOURCE = Path(forerun.__file__).parent
LAYERS = [
    "reference", "core", "trie", "integrations", "kernels", "kv", "policy", "models", "tensor_parallel", "decoding",
    "engine", "audit", "bench", "api", "server", "replicas", "cli",
]  # fmt: skip
USES_TRANSFORMERS = {"models", "tensor_parallel", "engine", "audit", "bench", "api", "cli"}
RANK = {name: rank for rank, name in enumerate(LAYERS)}
FEW_NEED = {
    "decoding.sources.head_source", "engine.kv_store", "kernels.linear.gguf_formats", "models.heads", "models.loading",
}  # fmt: skip
"""What is imported once it is wanted: trained heads, stored weights, the loading of models, a store on disk."""


def imports(file: Path) -> set[str]:
    names = {alias.name for node in nodes(file) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes(file) if isinstance(node, ast.ImportFrom)}


def test_every_module_imports_from_layers_below_it_only():
    for file in SOURCE.rglob("*.py"):
        layer = file.relative_to(SOURCE).with_suffix("").parts[0]
        if layer == "__init__":
            continue
        for name in imports(file):
            parts = name.split(".")
            if parts[0] == "forerun" and len(parts) > 1 and parts[1] != layer:
                assert RANK[parts[1]] <= RANK[layer], f"{file} imports {name}"
            if parts[0] == "transformers":
                assert layer in USES_TRANSFORMERS, f"{file} imports {name}"


def test_what_only_posix_has_is_imported_where_it_is_used():
    for file in SOURCE.rglob("*.py"):
        for node in parsed(file).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"fcntl", "resource", "termios", "pwd"} & set(names), f"{file} imports {names}"


def test_sources_do_not_import_each_other():
    files = list((SOURCE / "decoding" / "sources").glob("*.py"))
    assert len(files) > 3
    for file in files:
        others = {name for name in imports(file) if name.startswith("forerun.decoding.")}
        assert others <= {"forerun.decoding.source", "forerun.decoding.row"}, f"{file} imports {others}"


def test_an_engine_imports_only_what_all_of_its_users_need():
    waiting, seen = {"forerun.engine.engine"}, set[str]()
    while waiting:
        name = waiting.pop()
        path = SOURCE.parent.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not file.exists():
            continue
        seen.add(name)
        for node in parsed(file).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert len(seen) > 50
    assert not {name for name in seen for few in FEW_NEED if f"{name}.".startswith(f"forerun.{few}.")}


def test_no_module_outside_kv_asks_for_a_caches_class():
    for file in SOURCE.rglob("*.py"):
        if file.relative_to(SOURCE).parts[0] == "kv":
            continue
        imported = [node for node in nodes(file) if isinstance(node, ast.ImportFrom)]
        kv = [node for node in imported if f"{node.module}.".startswith("forerun.kv.")]
        caches = {alias.name for node in kv for alias in node.names if alias.name.endswith(("Cache", "View"))}
        for node in nodes(file):
            asks = isinstance(node, ast.Compare) or (
                isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            )
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if asks else set()
            assert not named & caches, f"{file}:{node.lineno} asks for {named & caches}"
            assert getattr(node, "attr", "") != "__class__", f"{file}:{node.lineno}"


def test_what_several_tests_use_is_in_support():
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        if not re.search(r"^\s*(from|import)\s+[\w.]*\btest_", file.read_text(), re.MULTILINE):
            continue  # quicker than to parse it
        for name in imports(file):
            assert not name.rpartition(".")[2].startswith("test_"), f"{file} imports {name}"
