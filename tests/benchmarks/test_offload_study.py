"""``python -m benchmarks offload``: what it measures of a prompt that does not fit on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.studies.offload_command import OffloadOptions


def test_the_command_measures_reading_and_speed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and then it sleeps in the sun. " * 60)
    out = tmp_path / "out"
    arguments = [
        "offload",
        "--text",
        str(text),
        "--contexts",
        "300",
        "--rounds",
        "1",
        "-n",
        "48",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, [*arguments, "--drafters", "trie", "--cache-budget", "32"])
    assert result.exit_code == 0, result.output
    report = json.loads((out / "offload.json").read_text())
    (read,) = report["parts"]["reading"]
    assert read["written"] == read["away_bytes"] and read["of_least"] == 1
    assert [row["same_output"] for row in report["parts"]["speed"]] == [1, 1]
    assert (out / "offload-speed.png").stat().st_size > 5000 and "tokens/s" in (out / "offload.md").read_text()
    kept = CliRunner().invoke(app, [*arguments, "--drafters", "trie", "--kv-memory", "1GB"])
    assert kept.exit_code == 0, kept.output
    assert json.loads((out / "offload.json").read_text())["settings"]["bandwidth"] > 1


def test_bench_offload_takes_a_bandwidth_alone_and_refuses_the_rest_at_once() -> None:
    OffloadOptions(simulate_bandwidth=10**9)
    with pytest.raises(ValueError, match=r"--kv-host-memory is of .* add --kv-memory"):
        OffloadOptions(kv_host_memory=10**9, simulate_bandwidth=10**9)
