"""Files of JSON lines, with the place of what is wrong in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(file: Path, option: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line that is not blank; ``option`` named the file.

    Raises:
        ValueError: if there is no such file, or with the first line that is no JSON.
    """
    if not file.is_file():
        raise ValueError(f"{option or 'a file'} is {file}; there is no such file")
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            place = f"{option} {file}, line {number}".lstrip()
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place} is no JSON: {error}") from None
