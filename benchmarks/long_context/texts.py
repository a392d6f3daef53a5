"""Long texts to measure on: files, folders of files, or invented prose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.training import tasks
from benchmarks.training.tasks import Material

Encode = Callable[[str], list[int]]
SEED = "long"
CHARS = 8  # the most characters per token, on average
SAMPLE = 50_000  # characters of a sample from which characters per token are estimated
SUFFIXES = (".txt", ".md")  # endings of the files that are taken from a folder


@dataclass(frozen=True)
class Texts:
    """The source of prompts, each from another file, or from another place if there are more prompts than files.
    Without ``bodies``, the texts of the files ``names``, facts are invented."""

    encode: Encode
    bodies: Sequence[str] = ()
    names: Sequence[str] = ()

    @classmethod
    def read(cls, paths: Sequence[Path], encode: Encode) -> Texts:
        """Read files in the given order, and the text files of folders by name; raise ValueError without any."""
        files = [file for path in paths for file in _files(path)]
        return cls(encode, [_text(file) for file in files], [file.name for file in files])

    def chars(self, index: int, count: int) -> str:
        """Return ``count`` characters of prompt ``index``, or fewer if the text is short."""
        if not self.bodies:
            return " ".join(tasks.filler(Random(f"{SEED}/{index}"), Material(), count))
        turn, file = divmod(index, len(self.bodies))
        return self.bodies[file][turn * count : (turn + 1) * count]

    def material(self, index: int) -> Material:
        """Return the paragraphs of a prompt's file, for tasks."""
        if not self.bodies:
            return Material()
        parts = self.bodies[index % len(self.bodies)].split("\n\n")
        return Material(prose=tuple(part.strip() for part in parts if len(part.strip()) > 1))

    def tokens(self, index: int, count: int) -> list[int]:
        """Return the ``count`` tokens of prompt ``index``; raise ValueError if the text is too short."""
        found = self.encode(self.chars(index, CHARS * count))[:count]
        if len(found) < count:
            name = self.names[index % len(self.names)] if self.names else "the invented text"
            raise ValueError(f"{name} gives {len(found)} tokens for prompt {index + 1}; {count} are needed")
        return found

    def check(self, prompts: int, count: int) -> None:
        """Raise ValueError unless there are ``prompts`` prompts of ``count`` tokens."""
        for index in range(prompts):
            self.tokens(index, count)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"--text is {path}; there is no such file or folder")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not found:
        raise ValueError(f"--text is {path}; that folder has no file that ends in {' or '.join(SUFFIXES)}")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text has {file}, which is no text in UTF-8: {error}") from None
