"""Trie files: versioned, checksummed, written atomically, without pickle; the index is rebuilt from the outputs.

Layout: ``TRIE_FILE_MAGIC``, version (uint32), SHA-256 of the rest, header length (uint32), header (JSON: the
vocabulary's name, the size of a dumped mixer, and name, outputs and tokens of each namespace), then little-endian, for
each namespace: its mixer (float32), the lengths of its outputs and their tokens (int32).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun.core.tree import IntArray
from forerun.trie import logistic_mixer
from forerun.trie.arrays import FloatArray
from forerun.trie.logistic_mixer import Mixer

TRIE_FILE_MAGIC = b"forerun trie\n"
TRIE_FILE_VERSION = 5

TEXTS_VERSIONS = (3, 4)
"""Older versions with readable outputs; their mixers rate other kinds of evidence and are not read."""

ONE_MIXER_VERSION = 3

_PREFIX = struct.Struct(f"<{len(TRIE_FILE_MAGIC)}sI32sI")


class TrieFileError(ValueError):
    """The file is damaged, not a trie, or of another version."""


class Content(NamedTuple):
    """Outputs by namespace, int64, oldest first; their mixers; and the vocabulary's name, or ""."""

    namespaces: dict[str, list[IntArray]]
    mixers: dict[str, Mixer]
    vocabulary: str


def write(
    path: str | os.PathLike[str],
    namespaces: Mapping[str, Sequence[IntArray]],
    learned: Mapping[str, FloatArray],
    vocabulary: str = "",
) -> None:
    """Replace ``path`` atomically; only its owner can read it.

    Raises:
        OSError: if it cannot be written, as on a full disk; ``path`` is unchanged. Or if the folder cannot be
            synchronised; ``path`` is new, but may be lost in a power cut.
    """
    path = Path(path)
    sizes = [[name, len(texts), sum(map(len, texts))] for name, texts in namespaces.items()]
    header = json.dumps([vocabulary, max(map(len, learned.values()), default=0), *sizes]).encode()
    parts = [header]
    for name, texts in namespaces.items():
        parts.append(learned[name].astype("<f4").tobytes())
        parts.append(np.array([len(text) for text in texts], "<i4").tobytes())
        parts += [text.astype("<i4").tobytes() for text in texts]
    size = struct.pack("<I", len(header))
    digest = hashlib.sha256(b"".join([size, *parts])).digest()
    try:
        _replace(path, [_PREFIX.pack(TRIE_FILE_MAGIC, TRIE_FILE_VERSION, digest, len(header)), *parts])
    except OSError as error:
        message = f"the trie was not saved ({error.strerror or error}); an existing file is unchanged"
        raise OSError(error.errno, message, str(path)) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        message = f"the trie was saved, but may be lost in a power cut ({error.strerror or error})"
        raise OSError(error.errno, message, str(path)) from error


def _replace(path: Path, parts: list[bytes]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power cut, where the system supports it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str]) -> Content:
    """Read what ``write`` wrote.

    Raises:
        TrieFileError: if the file is truncated, altered, of another version, or not a trie.
        OSError: if it cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(TRIE_FILE_MAGIC):
        raise TrieFileError(f"{path} is not a trie file")
    if len(data) < _PREFIX.size:
        raise TrieFileError(f"{path} is truncated")
    _, version, digest, length = _PREFIX.unpack_from(data)
    if version not in (*TEXTS_VERSIONS, TRIE_FILE_VERSION):
        raise TrieFileError(
            f"{path} has version {version}; this program reads versions {min(TEXTS_VERSIONS)} to {TRIE_FILE_VERSION}"
        )
    if hashlib.sha256(data[_PREFIX.size - 4 :]).digest() != digest:
        raise TrieFileError(f"{path} is truncated or damaged: its checksum does not match")
    try:
        return _parse(data[_PREFIX.size :], length, version)
    except (ValueError, TypeError) as error:
        raise TrieFileError(f"{path} has no valid content: {error}") from error


def _parse(body: bytes, length: int, version: int) -> Content:
    vocabulary, count, *sizes = json.loads(body[:length])
    once = version == ONE_MIXER_VERSION
    offset = length + (8 * count if once else 0)
    namespaces: dict[str, list[IntArray]] = {}
    mixers: dict[str, Mixer] = {}
    for name, outputs, tokens in sizes:
        learned = np.frombuffer(body, "<f4", 0 if once else count, offset)
        lengths = np.frombuffer(body, "<i4", outputs, offset + learned.nbytes)
        text = np.frombuffer(body, "<i4", tokens, offset + learned.nbytes + lengths.nbytes).astype(np.int64)
        if (lengths < 0).any() or lengths.sum() != tokens or (text < 0).any():
            raise ValueError(f"namespace {name!r} is not a list of sequences")
        namespaces[str(name)] = np.split(text, np.cumsum(lengths)[:-1]) if outputs else []
        fits = version == TRIE_FILE_VERSION
        mixers[str(name)] = logistic_mixer.restore(learned.astype(np.float64)) if fits else logistic_mixer.prior()
        offset += learned.nbytes + lengths.nbytes + 4 * tokens
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes too many")
    return Content(namespaces, mixers, str(vocabulary))
