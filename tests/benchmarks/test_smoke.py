"""Every command of ``python -m benchmarks`` is there, and refuses what is wrong before any work."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forerun
from benchmarks.__main__ import COMMANDS, app
from benchmarks.studies.constants import CONSTANTS, _set
from forerun.cli.options import DebugOptions

WRONG = [
    (("tasks", "--batch", "1,2"), "--batch is '1,2'; no number may be below 2"),
    (("passes", "--model", "./nowhere"), "there is no folder ./nowhere"),
    (("specbench",), "there is nothing to measure; give --questions, --tasks or both"),
    (("specbench", "--questions", "nowhere.jsonl"), "--questions is nowhere.jsonl; there is no such file"),
    (("specbench", "--tasks", "--budget", "0"), "--budget is '0'; no number may be below 1"),
    (("papers", "triforce", "--contexts", "8"), "no number may be below 16"),
    (("papers", "triforce", "--kv-host-memory", "1GB"), "--kv-host-memory is for what does not fit on the device; add"),
    (("server", "load", "--rates", "x"), "--rates is 'x'; it must be numbers"),
    (("peers", "--formats", "Q9"), "--formats has 'Q9'; known are bfloat16, Q4_0"),
    (("peers", "--peer-python", "nowhere"), "--peer-python is nowhere; it must be an environment's interpreter"),
    (("tasks", "--peer-python", "nowhere"), "--peer-python is for the peers; add --peers"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else ""
)
def test_a_wrong_setting_is_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["tasks", "specbench --tasks", "passes", "papers lookahead", "papers triforce"])
def test_missing_matplotlib_is_reported_before_any_work(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.reporting.plots.find_spec", lambda name: None)
    done = CliRunner().invoke(app, [*command.split(), "--model", "./nowhere"])
    assert done.exit_code == 2
    assert "[bench]'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_help(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="benchmarks")
    assert done.exit_code == 0, done.output
    assert f"Usage: benchmarks {command} " in done.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_that_running_one_needs(command: str) -> None:
    module, _, options = COMMANDS[command][0].partition(":")
    assert issubclass(getattr(importlib.import_module(f"benchmarks.{module}"), options), DebugOptions)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in CONSTANTS.items() for name in names])
def test_every_constant_that_is_studied_is_there(file: str, name: str, tmp_path: Path) -> None:
    text = (Path(forerun.__file__).parent / file).read_text()
    assert _set(tmp_path / "changed.py", text, name, 0.5)


def test_simulated_worlds_of_constants_run() -> None:
    done = CliRunner().invoke(app, ["constants", "--once"])
    assert done.exit_code == 0, done.output
    assert all(rate > 0 for rate in json.loads(done.stdout).values())
