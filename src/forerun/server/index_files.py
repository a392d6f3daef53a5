"""Fill a server's index: from files to start with, and from the folder that saves it between starts.

Files are plain text, or JSON lines of answers and of prompts to prefill (``warm_prompts.py``). All are checked before
the model is loaded, and later encoded passage by passage until ``warm_seconds`` are over.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from forerun.core.tree import IntArray
from forerun.decoding.recipes import trie_of
from forerun.engine.engine import Engine
from forerun.models.text.prompts import vocabulary_of
from forerun.server.settings import ServerSettings
from forerun.server.tenants import NAMESPACE_PATTERN, full_namespace
from forerun.server.warm_prompts import JSON_LINES_SUFFIXES, is_prompt, json_rows, text_lines, warm_prompts
from forerun.trie.autosave import AutoSaver
from forerun.trie.trie import Trie
from forerun.trie.trie_file import Content
from forerun.trie.trie_folder import Folder

log = logging.getLogger(__name__)

PASSAGE_CHARACTERS = 1 << 14
"""Characters indexed as one output. A full index drops whole outputs, and encoding one costs some milliseconds."""
TEXT_FIELDS = ("text", "answer")
"""Fields of a JSON line to index: of ``forerun generate --json``, and of recordings with an unindexed ``prompt``."""
MAX_NAMESPACES = 256
"""Namespaces of all tenants together. Each reserves 64 MiB of addresses, and uses as much memory as it needs."""


@dataclass(frozen=True)
class Passage:
    """A passage of text, its namespace, and its place in a file."""

    text: str
    namespace: str
    file: Path
    line: int


def check_files(files: Iterable[Path], namespaces: int) -> None:
    """Read all files; raise ValueError, with file and line, for a wrong line, no content, or too many namespaces."""
    names: set[str] = set()
    for file in files:
        empty = True
        for passage in passages(file):
            empty = False
            names.add(passage.namespace)
            if len(names) > namespaces:
                where = f"{file}:{passage.line} has namespace {passage.namespace!r}"
                raise ValueError(f"{where}: a tenant may have {namespaces} namespaces")
        for prompt in warm_prompts([file]):
            empty = False
            prompt.request("any")
        if empty:
            raise ValueError(f"{file} has no text to index and no prompt to prefill")


def passages(file: Path) -> Iterator[Passage]:
    """Yield the passages of a file; errors as in ``check_files``."""
    rows = _rows(file) if file.suffix in JSON_LINES_SUFFIXES else _paragraphs(file)
    for text, namespace, line in rows:
        for start in range(0, len(text), PASSAGE_CHARACTERS):
            yield Passage(text[start : start + PASSAGE_CHARACTERS], namespace, file, line)


def restore_index(engine: Engine, settings: ServerSettings, tenants: Sequence[str]) -> AutoSaver | None:
    """Limit an engine's index, fill it from its folder and files; return a saver; raise ValueError for wrong ones."""
    trie, tokenizer = _trie(engine, settings), engine.tokenizer
    if trie is None:
        return None
    assert tokenizer is not None
    trie.bound(int(settings.index_limit), MAX_NAMESPACES, settings.namespaces * (len(tenants) if settings.share else 1))
    if settings.index is None:
        _fill(trie, tokenizer, [], settings, tenants)
        return None
    folder = Folder(settings.index, vocabulary_of(tokenizer))
    try:
        kept = folder.read()
        changed = _fill(trie, tokenizer, kept, settings, tenants)
    except BaseException:
        folder.close()
        raise
    folder.holds({name: number for name, number in trie.changes().items() if name not in changed})
    return AutoSaver(trie, folder, settings.index_interval)


def _trie(engine: Engine, settings: ServerSettings) -> Trie | None:
    try:
        return trie_of(engine.level)
    except ValueError as error:
        if settings.index is None and not any(True for file in settings.warm for _ in passages(file)):
            return None
        wrong = f"index and warm are for drafters with a trie, and drafter is {settings.drafter!r}"
        raise ValueError(wrong) from error


def _fill(
    trie: Trie, tokenizer: Any, kept: Sequence[Content], settings: ServerSettings, tenants: Sequence[str]
) -> set[str]:
    """Fill an empty index from files and a folder, whose sequences come last, to stay if there is little room, as they
    were generated; those in both count once. Return namespaces with sequences that the folder lacks."""
    known = {name: set(map(_digest_of, rows)) for each in kept for name, rows in each.namespaces.items()}
    changed, indexed, until = set(), 0, time.monotonic() + settings.warm_seconds
    for passage in chain.from_iterable(map(passages, settings.warm)):
        if time.monotonic() > until:
            message = "%s:%d and everything after it was not indexed: warm_seconds, %g, are over"
            log.warning(message, passage.file, passage.line, settings.warm_seconds)
            break
        encoded = tokenizer(passage.text, add_special_tokens=False, verbose=False)
        tokens = np.array(encoded["input_ids"], np.int64)
        for name in dict.fromkeys(full_namespace(each, passage.namespace, settings.share) for each in tenants):
            if _digest_of(tokens) not in known.get(name, ()):
                trie.warm(name, [tokens])
                changed.add(name)
                indexed += len(tokens)
    for each in kept:
        for name, rows in each.namespaces.items():
            trie.adopt(name, each.mixers[name])
            trie.warm(name, rows)
    if settings.warm or kept:
        total = sum(len(row) for each in kept for rows in each.namespaces.values() for row in rows)
        log.info("indexed %s new tokens from files, and %s from the folder", f"{indexed:,}", f"{total:,}")
    return changed


def _digest_of(tokens: IntArray) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _paragraphs(file: Path) -> Iterator[tuple[str, str, int]]:
    lines: list[str] = []
    size, first = 0, 1
    for number, line in text_lines(file):
        if lines and size + len(line) > PASSAGE_CHARACTERS:
            yield "".join(lines), "default", first
            lines, size, first = [], 0, number
        lines.append(line)
        size += len(line)
    if size:
        yield "".join(lines), "default", first


def _rows(file: Path) -> Iterator[tuple[str, str, int]]:
    for number, row in json_rows(file):
        if is_prompt(row):
            continue
        try:
            yield *_row(row), number
        except (ValueError, TypeError) as error:
            wrong = f"{file}:{number} is no JSON object with 'text', 'answer' or 'messages', and perhaps 'namespace'"
            raise ValueError(f"{wrong}: {error}") from None


def _row(row: Any) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise TypeError(f"it is a {type(row).__name__}")
    text = next((row[name] for name in TEXT_FIELDS if name in row), None)
    namespace = row.get("namespace", "default")
    if not isinstance(text, str) or not text:
        raise TypeError("the text is missing, empty, or no string")
    text.encode()  # fails for a lone surrogate
    if not isinstance(namespace, str) or not re.fullmatch(NAMESPACE_PATTERN, namespace):
        raise TypeError(f"the namespace does not match {NAMESPACE_PATTERN}")
    return text, namespace
