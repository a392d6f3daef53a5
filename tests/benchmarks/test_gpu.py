"""The command for GPUs, on a CPU: each part at its smallest size, most of them in Triton's interpreter."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.__main__ import app
from benchmarks.gpu import part_process
from benchmarks.gpu.counting import WaitCounter, compilations
from benchmarks.gpu.goals import goals
from benchmarks.gpu.gpu_bench import GpuBench
from benchmarks.gpu.gpu_command import GPU_PARTS, PART_SECONDS, TABLES, GpuOptions, run
from benchmarks.gpu.part_process import OTHER_COMMANDS, SMOLLM2, PartRecord, bench_of, measure

NEEDS_MORE = {"vllm": "not installed", "tasks": SMOLLM2, "server": SMOLLM2}
"""Parts that this machine lacks something for, and what."""


def test_each_part_has_a_time_and_a_table() -> None:
    assert sum(PART_SECONDS.values()) == 600
    assert {*GPU_PARTS} == {name for table in TABLES for name in table.parts} >= {*OTHER_COMMANDS}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [name for name in GPU_PARTS if name != "triforce-measured"]
)  # triforce at another rate
def test_a_part_runs_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    record = measure(name, GpuBench.smallest(), tmp_path)
    if name in NEEDS_MORE:
        assert not record.whole and NEEDS_MORE[name] in record.skipped[name]
        return
    assert record.whole and record.rows and not record.skipped
    assert PartRecord.read(tmp_path, name, GpuBench.smallest().sizes) == record
    table = next(table for table in TABLES if name in table.parts)
    optional = {"part", "bytes_per_token", "reason", "acceptance", "same_as_plain"}
    assert all(row.get(column) is not None for row in record.rows for column in {*table.columns} - optional)
    if name == "kernels":
        assert all(row["same_bits"] and row["relative_error"] < 1e-5 for row in record.rows)
    if name == "cells":
        assert all(row["equal"] and row["accepted"] for row in record.rows)
    if name == "overlap":
        [row] = record.rows
        assert row["gigabytes"] == pytest.approx(2 * 2 * 16 * 4 * 247 / 1e9)  # layer 1 has a buffer alone
    if name == "steps":
        assert all(row["recorded_late"] == row["compiled_late"] == 0 for row in record.rows)
    if name == "server-bundled":
        assert {row["value"] for row in record.rows} == {1, 16, 64}


@pytest.mark.matrix
def test_a_second_call_goes_on(tmp_path: Path) -> None:
    options = GpuOptions(parts="kernels,decoding", out=tmp_path, json=True)
    run(options)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [row["who"] for row in parts["decoding"]] == ["forerun"]
    assert parts["skipped"] == [] and (tmp_path / "gpu-decoding.png").exists()
    before = (tmp_path / "parts" / "kernels.json").stat().st_mtime_ns
    run(replace(options, parts="kernels,vllm"))
    again = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [again[name] for name in ("kernels", "decoding")] == [parts[name] for name in ("kernels", "decoding")]
    assert [row["what"] for row in again["skipped"]] == ["vllm"]
    assert (tmp_path / "parts" / "kernels.json").stat().st_mtime_ns == before


def test_a_part_that_takes_too_long_is_ended_and_without_time_none_begins(tmp_path: Path) -> None:
    run(GpuOptions(parts="kernels", minutes=0.005, out=tmp_path, json=True))
    assert "stopped after" in PartRecord.read(tmp_path, "kernels", GpuBench.smallest().sizes).skipped["kernels"]
    run(GpuOptions(parts="kernels,steps", minutes=0.0, out=tmp_path, json=True))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {row["what"]: row["why"] for row in parts["skipped"]} == dict.fromkeys(
        ("kernels", "steps"), "no time was left; call the command again"
    )


def test_an_error_is_noted_and_what_was_measured_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, bench: GpuBench, out: Path) -> Any:
        yield {"kernel": "product"}
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(part_process, "_rows", failing)
    bench = GpuBench.smallest()
    record = measure("kernels", bench, tmp_path)
    assert record.rows and not record.whole
    assert record.skipped == {"kernels": "RuntimeError: CUDA error: an illegal memory access"}
    other = {**bench.sizes, "rounds": 7}
    assert PartRecord.read(tmp_path, "kernels", bench.sizes) == record
    assert PartRecord.read(tmp_path, "kernels", other) == PartRecord(record.card, other)
    monkeypatch.setattr(part_process, "this_card", lambda: "another card")
    assert PartRecord.read(tmp_path, "kernels", bench.sizes) == PartRecord("another card", bench.sizes)


def test_vllm_is_called_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class LLM:
        def __init__(self, model: str, load_format: str, max_model_len: int, **options: Any) -> None:
            config = json.loads((Path(model) / "config.json").read_text())
            assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 32
            assert load_format == "dummy" and options["dtype"] == "float32"

        def generate(self, prompts: list[dict[str, list[int]]], how: SimpleNamespace, use_tqdm: bool) -> None:
            calls.append((len(prompts[0]["prompt_token_ids"]), how.max_tokens))

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("benchmarks.gpu.libraries.find_spec", lambda name: name == "vllm")
    [row] = measure("vllm", GpuBench.smallest(), tmp_path).rows
    assert row["who"] == "vLLM" and calls == [(40, 1), (40, 1), (40, 33)]


def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with WaitCounter(torch.device("cpu")) as counter:
        torch.ones(2).sum().item()
        torch.ones(2).tolist()
    assert counter.counts == {"transfers": 2}
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with WaitCounter(torch.device("cuda")) as counter:
        torch.cuda.synchronize()
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.ones(2).tolist()  # on the CPU
    assert counter.counts == {"synchronisations": 1, "blocking": 1, "transfers": 0}
    assert modes == ["warn", "default"]


def test_compiled_kernels_are_counted() -> None:
    from triton import knobs

    with compilations() as found:
        knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="_scan"), key="", compile={})
    assert found == ["_scan"] and knobs.runtime.jit_post_compile_hook is None


def test_sizes_on_a_gpu_are_those_of_the_options_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    options = GpuOptions(contexts="122000,2048", books=Path("books"), raw=True)
    bench = bench_of(json.loads(json.dumps(options.measured)))
    assert (bench.dtype, bench.on_gpu, bench.contexts) == (torch.bfloat16, True, [2048, 122_000])
    assert bench.sources == ["--raw", "--books", "books"] and bench.models[0] == "bundled"
    assert [*bench.texts()] == [("llama-2-7b", 2048), ("llama-3-8b", 2048), ("llama-3-8b", 122_000)]
    assert bench.skipped == {"llama-2-7b at 122,000 tokens": "needs 83 GB of 80"}


def test_goals_take_the_worst_figure() -> None:
    parts: dict[str, Any] = {name: [] for name in GPU_PARTS}
    assert goals(parts) == []
    parts["decoding"] = [{"context": 2048, "share_of_bandwidth": share} for share in (0.9, 0.7)]
    parts["triforce"] = [{"contestant": "none", "speed_up": 1.0}, {"contestant": "triforce", "speed_up": 2.5}]
    speeds = {"forerun none": 100.0, "forerun auto": 150.0, "forerun, wrong drafts": 96.0}
    parts["tasks"] = [{"task": "rag", "contestant": who, "tokens_per_second": each} for who, each in speeds.items()]
    parts["steps"] = [{"recorded_late": 0, "compiled_late": 1}]
    assert [(row["reached"], row["met"]) for row in goals(parts)] == [
        (0.7, False),
        (2.5, True),
        (0.96, False),
        (1, False),
    ]


@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_commands_take_the_arguments_for_a_gpu(name: str, tmp_path: Path) -> None:
    """They get as far as the GPU, which is not there."""
    done = CliRunner().invoke(app, [*OTHER_COMMANDS[name].arguments, "--model", "bundled", "--out", str(tmp_path)])
    assert done.exit_code, done.output
    assert "cuda" in f"{done.output}{done.exception}".lower()
