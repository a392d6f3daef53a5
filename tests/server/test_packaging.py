"""What packages start: builds nothing, but each flag and variable that they name is one of the server's."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import forerun
from forerun.cli.serve_options import ServeOptions
from forerun.server.settings import ENVIRONMENT_PREFIX, ServerSettings

FOLDER = Path(forerun.__file__).parents[2] / "packaging"
LINES = ("ENTRYPOINT", "command:", "ExecStart=")
"""Begin lines in which the command is called."""


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "forerun.service"])
def test_flags_and_variables_exist(name: str) -> None:
    text = (FOLDER / name).read_text()
    (command,) = [line for line in text.splitlines() if line.strip().startswith(LINES)]
    known = {field.name for field in fields(ServeOptions)}
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", command)}
    assert flags and flags <= known
    variables = {word.lower() for word in re.findall(rf"{ENVIRONMENT_PREFIX}([A-Z_]+)", text)}
    assert variables <= set(ServerSettings.model_fields)
