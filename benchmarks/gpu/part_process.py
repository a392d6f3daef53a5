"""One part of ``python -m benchmarks gpu``, in a process of its own: an error of a GPU ends the process that made it,
and what other libraries allocate is gone with theirs."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.capacity.shapes import ModelShape
from benchmarks.gpu.gpu_bench import GpuBench
from forerun.bench.machine import Row
from forerun.bench.report import replace_file

SMOLLM2 = "runs/real/SmolLM2-135M-Instruct"
"""Where ``make real`` puts a chat model."""


class OtherCommand(NamedTuple):
    """A part that is a command with a report of its own.

    Attributes:
        arguments: on a GPU.
        smallest: without one.
        report: its JSON file.
        rows: where its rows are in there.
        interpreted: whether it takes the way of GPUs in the interpreter; servers are processes of their own.
    """

    arguments: tuple[str, ...]
    smallest: tuple[str, ...]
    report: str
    rows: tuple[str, ...]
    interpreted: bool = True


_SPARSE = ("--sparse", "retrieval")
_CUDA = ("--dtype", "bfloat16", "--device", "cuda")
_CPU = ("--dtype", "float32", "--device", "cpu", "--rounds", "1")
_LONG = (*_SPARSE, *_CUDA, "--drafters", "triforce,retrieval", "--contexts", "122000")
_SHORT = (*_SPARSE, *_CPU, "--drafters", "triforce", "-n", "6", "--draft-shape", "1,32,48,2,1,61", "--cache-budget",
          "8", "--chunk", "2", "--gamma1", "2", "--gamma2", "4", "--fixed")  # fmt: skip
_TRIFORCE = ("papers", "triforce", "--parts", "temperatures")
_OFFLOAD = ("offload", "--simulate-acceptance", "0.9")
_TASKS = ("tasks", "-d", "none", "-d", "auto", "--warm-prompts", "0", "--skip", "transformers prompt lookup",
          "--resume")  # fmt: skip
_SERVER = ("server", "load", "--contestants", "none,auto", "--rates", "0", "--rounds", "1", "--resume")


def _triforce(*acceptance: str) -> OtherCommand:
    rates = ("--simulate-acceptance", acceptance[0], "--simulate-small-acceptance", acceptance[1])
    return OtherCommand((*_TRIFORCE, *rates, *_LONG, "--rounds", "3", "-n", "256"),
                        (*_TRIFORCE, *rates, *_SHORT, "--contexts", "48", "--shape", "1,32,48,2,1,61"),
                        "triforce.json", ("parts", "temperatures"))  # fmt: skip


def _tasks(*model: str) -> OtherCommand:
    return OtherCommand((*_TASKS, *_CUDA, "--prompts", "2", "--rounds", "1", "-n", "64", *model),
                        (*_TASKS, *_CPU, "--prompts", "1", "-n", "4", "--task", "json", *model),
                        "speed.json", ("rows",), False)  # fmt: skip


def _server(*model: str) -> OtherCommand:
    return OtherCommand((*_SERVER, *_CUDA, "--concurrency", "1,16,64", "--requests", "64", *model),
                        (*_SERVER, *_CPU, "--concurrency", "1,16,64", "--requests", "1", "--lengths", "4",
                         "--checks", "0", "--tasks", "json"), "serve.json", ("parts", "load"), False)  # fmt: skip


OTHER_COMMANDS: Mapping[str, OtherCommand] = {
    "triforce": _triforce("0.9", "0.45"),
    "triforce-measured": _triforce("0.55", "0.45"),
    "offload": OtherCommand((*_OFFLOAD, *_LONG, "--rounds", "1", "-n", "64", "--gamma2", "32"),
                            (*_OFFLOAD, *_SHORT, "--contexts", "118", "--shape", "3,32,48,2,1,61",
                             "--simulate-bandwidth", "1MB"), "offload.json", ("parts", "speed")),
    "tasks": _tasks("--model", SMOLLM2),
    "tasks-bundled": _tasks("--skip", "transformers assisted"),
    "server": _server("--model", SMOLLM2),
    "server-bundled": _server(),
}  # fmt: skip


@dataclass
class PartRecord:
    """A part's file.

    Attributes:
        card: what it was measured on.
        sizes: those of ``GpuBench``.
        rows: measured so far.
        skipped: what was not measured, and why.
        whole: whether all of it is there. If not, it is measured anew.
    """

    card: str
    sizes: Row
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    whole: bool = False

    @classmethod
    def read(cls, out: Path, name: str, sizes: Row) -> PartRecord:
        """What is there of a part; nothing, if that is of another card or of other sizes."""
        path, nothing = _path(out, name), cls(this_card(), sizes)
        if not path.exists():
            return nothing
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**found) if (found["card"], found.get("sizes")) == (nothing.card, sizes) else nothing

    def write(self, out: Path, name: str) -> None:
        """Replace the file."""
        path = _path(out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(self), indent=1) + "\n")


def _path(out: Path, name: str) -> Path:
    return out / "parts" / f"{name}.json"


def this_card() -> str:
    """The GPU's name; that of the interpreter without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter, on a CPU"


def measure(name: str, bench: GpuBench, out: Path) -> PartRecord:
    """Measure a part, and write its file after each row. An error is noted there."""
    from benchmarks.gpu.interpreter import gpu_code

    record = PartRecord(this_card(), bench.sizes, skipped=bench.skipped)
    record.write(out, name)
    interpreted = name not in OTHER_COMMANDS or OTHER_COMMANDS[name].interpreted
    try:
        with gpu_code(bench.device) if interpreted else nullcontext():
            for row in _rows(name, bench, out):
                record.rows.append(row)
                record.write(out, name)
        record.whole = bool(record.rows)
    except Exception as error:  # whatever a library raises is no reason to lose the other parts
        traceback.print_exc()  # to the part's log
        first = (str(error).splitlines() or [""])[0]
        bench.skipped[name] = f"{type(error).__name__}: {first}"
    record.write(out, name)
    return record


def _rows(name: str, bench: GpuBench, out: Path) -> Iterator[Row]:
    from benchmarks.gpu import libraries, parts

    if name in OTHER_COMMANDS:
        yield from _command(name, bench, out)
        return
    work: Callable[[GpuBench], Iterator[Row]] = getattr(parts, name, None) or getattr(libraries, name)
    yield from work(bench)


def _command(name: str, bench: GpuBench, out: Path) -> list[Row]:
    from benchmarks.__main__ import app

    command = OTHER_COMMANDS[name]
    if SMOLLM2 in command.arguments and SMOLLM2 not in bench.models:
        there = "make real fetches it" if bench.on_gpu else f"without a GPU {name}-bundled runs the same code"
        bench.skipped[name] = f"{SMOLLM2} is not there; {there}"
        return []
    arguments = [*(command.arguments if bench.on_gpu else command.smallest), "--out", str(out / name)]
    if name.startswith(("tasks", "server")):
        arguments += _sources(bench, chats=not name.endswith("-bundled"))
    status = app(arguments, standalone_mode=False)
    if status:
        raise RuntimeError(f"exit status {status}; see its output in {out / 'logs' / name}.log")
    return command_rows(name, out)


def _sources(bench: GpuBench, chats: bool) -> Sequence[str]:
    """Arguments for what tasks are drawn from; functions to complete are for models that chat."""
    place = bench.sources.index("--code") if "--code" in bench.sources and not chats else len(bench.sources)
    return [*bench.sources[:place], *bench.sources[place + 2 :]]


def command_rows(name: str, out: Path) -> list[Row]:
    """The rows that a command's report has so far."""
    command = OTHER_COMMANDS[name]
    path = out / name / command.report
    found: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for key in command.rows:
        found = found.get(key, {})
    return list(found)


def bench_of(settings: Mapping[str, Any]) -> GpuBench:
    """On this machine, with the command's settings, which do not count without a GPU."""
    if not torch.cuda.is_available():
        return GpuBench.smallest()
    shapes = {name: ModelShape.parse(name) for name in settings["shapes"]}
    models = ["bundled", *([SMOLLM2] if Path(SMOLLM2).exists() else [])]
    sizes = sorted(settings["contexts"]), sorted(settings["passes"]), settings["rounds"]
    return GpuBench(torch.device("cuda"), torch.bfloat16, shapes, *sizes, models, sources=settings["sources"])


if __name__ == "__main__":
    measure(sys.argv[1], bench_of(json.loads(sys.argv[3])), Path(sys.argv[2]))
