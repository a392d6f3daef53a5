"""The command for GPUs, on a CPU: each part's code at its smallest size, in Triton's interpreter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from support.triton_products import interpret_products

from benchmarks.__main__ import app
from benchmarks.gpu import gpu_command, part_process
from benchmarks.gpu.gpu_bench import GpuBench
from benchmarks.gpu.gpu_command import GOALS, PART_SECONDS, reached
from benchmarks.gpu.part_process import PARTS, measure, rows_file
from benchmarks.gpu.parts import KernelEvent, kernel_rows, padded


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["gpu", *map(str, arguments)])


def rows_of(name: str, out: Path) -> list[Any]:
    return [json.loads(line) for line in rows_file(out, name).read_text().splitlines()]


def test_seven_parts_have_345_seconds_and_each_goal_has_a_part():
    assert sum(PART_SECONDS.values()) == 345 and list(PART_SECONDS) == list(PARTS)
    assert {goal.part for goal in GOALS} <= {*PARTS}


@pytest.mark.matrix
@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_at_its_smallest_size(name, tmp_path, monkeypatch):
    interpret_products(monkeypatch)
    measure(name, GpuBench.smallest(), tmp_path)
    rows = rows_of(name, tmp_path)
    assert rows and all("error" not in row for row in rows)
    if name == "bits":
        assert all(row["same_bits"] for row in rows) and len({row["kernel"] for row in rows}) >= 8
    if name == "choices":
        assert {row.get("programs") for row in rows} >= {2, 4, 8}
        assert {row.get("registers") for row in rows} == {None, 168}
        assert {row["who"] for row in rows if row["choice"] == "product"} == {"ours", "library, 64 rows"}
    if name == "auto":
        assert [(row["drafter"], row["text"]) for row in rows] == [(d, n) for d in ("none", "auto") for n in (1, 2)]
        assert all(row["equal"] for row in rows)
    if name in ("triforce", "offload"):
        drafted = [row for row in rows if "speed_up" in row]
        assert all(row["same_output"] == 1 for row in drafted) and {row["contestant"] for row in drafted} > {"none"}
    for goal in reached(name, rows):
        assert goal["wanted"] and goal["met"] in (True, False)


def test_padded_products_are_the_library_s(monkeypatch):
    """Every call has 64 rows, and zeros where there are no tokens."""
    calls: list[int] = []
    library = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: (calls.append(len(x)), library(x, w))[1])
    x, weight = torch.randn(70, 32), torch.randn(16, 32)
    for n in (1, 64, 70):
        calls.clear()
        torch.testing.assert_close(padded(x[:n], weight)[0], x[:n] @ weight.T)
        assert calls == [64] * -(-n // 64)


def test_a_line_of_json_as_each_part_ends(tmp_path):
    done = call("--dry-run", "--parts", "machine", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    [line] = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    assert (line["part"], line["ended"], line["limit"]) == ("machine", "whole", gpu_command.DRY_RUN_SECONDS)
    assert line == json.loads((tmp_path / "gpu.jsonl").read_text()) and line["rows"] == rows_of("machine", tmp_path)


def test_a_part_is_ended_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_command, "DRY_RUN_SECONDS", 0.01)
    done = call("--dry-run", "--parts", "bits", "--out", tmp_path)
    [line] = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    assert line["ended"] == "stopped" and line["rows"] == [] and line["seconds"] < 5


def test_an_error_is_a_row_and_what_was_measured_before_is_kept(tmp_path, monkeypatch):
    def failing(bench: GpuBench) -> Any:
        yield {"kernel": "product"}
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setitem(part_process.PARTS, "bits", failing)
    with pytest.raises(RuntimeError):
        measure("bits", GpuBench.smallest(), tmp_path)
    error = {"error": "RuntimeError: CUDA error: an illegal memory access"}
    assert rows_of("bits", tmp_path) == [{"kernel": "product"}, error]


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "there is no GPU; --dry-run"), (("--parts", "none"), "--parts")]
)
def test_wrong_calls_end_before_any_part(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = call(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2 and message in done.stderr and not (tmp_path / "out").exists()


def test_kernels_times_and_the_gaps_before_them():
    events = [KernelEvent("a", 0, 4), KernelEvent("b", 5, 7), KernelEvent("a", 9, 13), KernelEvent("b", 13, 16)]
    assert kernel_rows(events) == [
        {"kernel": "a", "calls": 2, "microseconds": 4, "gap": 2},
        {"kernel": "b", "calls": 2, "microseconds": 2.5, "gap": 0.5},
    ]
    assert kernel_rows([]) == []


def test_goals_take_the_worst_figure_and_of_speed_ups_the_best():
    shares = [{"context": 2048, "share_of_bandwidth": share} for share in (0.9, 0.7)]
    kernels = reached("kernels", [*shares, {"context": 2048, "kernel": "_sums"}])
    assert [(row["reached"], row["met"]) for row in kernels] == [(0.7, False)]
    drafted = [{"contestant": who, "rate": rate, "speed_up": up}
               for who, rate, up in (("none", 0.9, 1.0), ("triforce", 0.9, 2.5), ("retrieval", 0.9, 2.0),
                                     ("triforce", 0.923, 9.0))]  # fmt: skip
    assert [(row["reached"], row["met"]) for row in reached("triforce", drafted)] == [(2.5, True)]
    auto = [{"drafter": "none", "milliseconds": 1.0, "of_none": 1.0, "recorded_late": 0},
            {"drafter": "auto", "milliseconds": 1.1, "of_none": 0.91, "recorded_late": 2}]  # fmt: skip
    assert [(row["reached"], row["met"]) for row in reached("auto", auto)] == [(0.91, False), (1.0, True), (2, False)]
    assert reached("machine", [{"what": "reading"}]) == []
