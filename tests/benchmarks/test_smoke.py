"""Every command of ``python -m benchmarks`` is there, and refuses what is wrong before any work."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forerun
from benchmarks.__main__ import COMMANDS, app
from benchmarks.studies.constants import CONSTANTS, _set
from benchmarks.studies.edit_picture import WINDOW
from forerun.cli.options import DebugOptions

WRONG = [
    ("tasks --gguf f", "--gguf is for the peers; add --peers"),
    ("tasks --peer-python nowhere", "--peer-python is for the peers; add --peers"),
    ("tasks --task verse", "task is 'verse'; known are copy, json"),
    (f"tasks --code {__file__}", "is no JSON"),
    ("edit -n 9", f"--max-new-tokens is 9; it must be above {2 * WINDOW}"),
    ("edit --file=missing.py", "missing.py"),
    ("passes --model ./nowhere", "there is no folder ./nowhere"),
    ("passes --dtypes int3", "--dtypes has 'int3'; known are auto, float32"),
    ("specbench", "there is nothing to measure; give --questions, --tasks or both"),
    ("specbench --questions nowhere.jsonl", "--questions is nowhere.jsonl; there is no such file"),
    ("papers lookahead --tasks json,rhymes", "task is 'rhymes'; known are copy, json"),
    ("papers lookahead --tasks maths", "no task is left"),
    ("papers triforce --contexts 8", "no number may be below 16"),
    ("papers triforce --parts x", "--parts has 'x'; known are temperatures"),
    ("papers triforce --drafters magic", "drafter is 'magic'"),
    ("papers triforce --drafters none", "measured in any case"),
    ("papers triforce -m ./nowhere --drafters low-rank,streaming", "streaming needs a small model: --draft-model"),
    ("papers triforce --text no.txt", "--text is no.txt; there is no such"),
    ("papers triforce --yarn 1", "--yarn is 1; it must be above 1"),
    ("papers triforce --contexts 200000", "the model has 131,072; give a shorter context, or --yarn 2"),
    ("papers triforce --kv-host-memory 1GB", "--kv-host-memory is for what does not fit on the device; add"),
    ("server load --concurrency 0 --rates 0", "give a load"),
    ("server load --contestants none,none", "each may be there once"),
    ("server load --contestants never", "never"),
    ("server load --tasks maths", "no task is left"),
    ("capacity --context 8X", "--context is '8X'; it must be numbers of tokens such as 8K"),
    ("capacity --devices 3", "devices is 3, which does not divide 32 heads"),
    ("capacity --model-shape x", "a shape is 'x'"),
    ("capacity --device-kind abacus", "a device is 'abacus'; known are a100-80gb"),
    ("capacity --weight-bytes 0", "--weight-bytes is 0; it must be above 0"),
    ("peers --formats Q9", "--formats has 'Q9'; known are bfloat16, Q4_0"),
    ("peers --peer-python nowhere", "--peer-python is nowhere; it must be an environment's interpreter"),
    ("train-bundled", "--quick"),
]


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_a_wrong_setting_is_named_in_the_last_line_with_status_2_and_nothing_is_written(
    command, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2, done.output
    assert message in done.stderr.splitlines()[-1], done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["tasks", "specbench --tasks", "passes", "papers lookahead", "papers triforce"])
def test_missing_matplotlib_is_reported_before_any_work(command, monkeypatch):
    monkeypatch.setattr("benchmarks.reporting.plots.find_spec", lambda name: None)
    done = CliRunner().invoke(app, [*command.split(), "--model", "./nowhere"])
    assert done.exit_code == 2
    assert "[bench]'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_help_and_has_the_options_that_running_one_needs(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="benchmarks")
    assert done.exit_code == 0, done.output
    assert f"Usage: benchmarks {command} " in done.output
    module, _, options = COMMANDS[command][0].partition(":")
    assert issubclass(getattr(importlib.import_module(f"benchmarks.{module}"), options), DebugOptions)


def test_every_constant_that_is_studied_is_there(tmp_path):
    for file, names in CONSTANTS.items():
        text = (Path(forerun.__file__).parent / file).read_text()
        assert all(_set(tmp_path / "changed.py", text, name, 0.5) for name in names), file


def test_simulated_worlds_of_constants_run():
    done = CliRunner().invoke(app, ["constants", "--once"])
    assert done.exit_code == 0, done.output
    assert all(rate > 0 for rate in json.loads(done.stdout).values())
