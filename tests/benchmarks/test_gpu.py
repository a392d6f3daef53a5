"""The command for GPUs, on a CPU: its smallest sizes in Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu.command import GPU_PARTS, OTHER_COMMANDS, OWN, GpuOptions, run

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow


def test_the_smallest_sizes_run_and_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = GpuOptions(parts="kernels,cells,decoding", out=tmp_path, json=True)
    run(options)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    [product] = parts["kernels"]
    assert product["same_bits"]
    assert product["relative_error"] < 1e-5
    [cell] = parts["cells"]
    assert cell["equal"]
    assert [row["who"] for row in parts["decoding"]] == ["forerun"]
    assert (tmp_path / "gpu-decoding.png").exists()

    monkeypatch.setattr("benchmarks.gpu.parts.kernels", lambda bench: pytest.fail("measured already"))
    monkeypatch.setattr("benchmarks.gpu.parts.decoding", lambda bench: pytest.fail("measured already"))
    run(replace(options, parts="kernels,decoding,audit,tasks"))
    again = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [again[name] for name in parts if name != "skipped"] == [parts[name] for name in parts if name != "skipped"]
    skipped = {row["what"]: row["why"] for row in again["skipped"]}
    assert skipped["audit"] == skipped["tasks"] == "needs a GPU"


def test_without_time_nothing_begins(tmp_path: Path) -> None:
    run(GpuOptions(parts="kernels,server", minutes=0.0, out=tmp_path, json=True))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [row["what"] for row in parts["skipped"]] == ["kernels", "server"]
    assert set(parts) == {"skipped"}


def test_each_part_is_known() -> None:
    from benchmarks.gpu import parts

    assert all(callable(getattr(parts, name)) for name in OWN)
    assert set(GPU_PARTS) == {*OWN, *OTHER_COMMANDS}
