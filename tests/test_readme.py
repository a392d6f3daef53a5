"""The README's commands and code run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forerun

ROOT = Path(forerun.__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), scope)
    assert len(capsys.readouterr().out) > 100


LONG = ("forerun audit", "forerun bench")
"""What these do is tested on tiny models each time, and on the bundled one by ``make matrix``."""


def marked(line: str) -> Any:
    return pytest.param(line, marks=[pytest.mark.matrix] * line.startswith(LONG))


@pytest.mark.parametrize("line", [marked(line) for block in blocks("bash") for line in block.splitlines() if line])
def test_commands_run(line: str) -> None:
    command = shlex.split(line)
    assert command[0] == "forerun"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "forerun.cli", *command[1:]],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
