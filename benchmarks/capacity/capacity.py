"""``python -m benchmarks capacity``: what models need on some devices, computed from their sizes.

``--predict`` adds what Forerun's GPU kernels should cost (``gpu_cost.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from benchmarks.capacity.devices import DEVICES, Machine, fit, kv_bytes, least_seconds
from benchmarks.capacity.gpu_cost import add_predicted
from benchmarks.capacity.shapes import SHAPES, ModelShape
from benchmarks.reporting.common_options import Listed, ListOptions, list_option, numbers_of
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.cli.options import Out, OutputOptions, option

_DEVICE = "Devices"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-70b")  # the default shapes
COLUMNS = {
    "model": "model", "context": "context", "weights": "weights, GB", "kv_kilobytes": "KV of a token, kB",
    "kv": "KV of all rows, GB", "read": "a pass reads, GB", "devices": "devices", "fits": "fits",
    "rate": "plain, tokens/s at most",
}  # fmt: skip


def contexts_in(flag: str, text: str) -> list[int]:
    """Return numbers of tokens, K for 1,024 and M for 1,048,576; raise ValueError for anything else."""
    parts = [re.fullmatch(r"([1-9]\d*)([KM]?)", part.strip().upper()) for part in text.split(",")]
    if None in parts:
        raise ValueError(f"{flag} is {text!r}; it must be numbers of tokens such as 8K,128K,1M with commas between")
    return [int(part[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[part[2]] for part in parts if part is not None]


@dataclass(frozen=True)
class CapacityOptions(ListOptions, OutputOptions):
    """What models need on some devices: bytes, what fits, and the most tokens a second without drafts.

    Computed from sizes alone. Writes JSON and Markdown; ``update-pages`` puts the tables of ``--predict`` into
    docs/scaling.md.
    """

    model_shape: Annotated[
        list[str] | None,
        option("--model-shape", panel="Model", metavar="NAME|SIZES", help=f"{', '.join(SHAPES)}, or layers,hidden,"
               f"intermediate,heads,kv_heads,vocabulary. May be repeated; default: {', '.join(MODELS)}."),
    ] = None  # fmt: skip
    weight_bytes: Annotated[float, option("--weight-bytes", panel="Model", help="Of one weight.")] = 2.0
    kv_bytes: Annotated[float, option("--kv-bytes", panel="Model", help="Of one number of a key or value.")] = 2.0
    context: Annotated[str, list_option("Text", "Tokens of each row, such as 8K,1M.")] = "8K,128K,1M"
    rows: Annotated[int, option("--rows", panel="Text", help="That are decoded together.", min=1)] = 1
    devices: Annotated[str, list_option(_DEVICE, "How many hold the model together.")] = "1,8"
    device_kind: Annotated[str, option("--device-kind", panel=_DEVICE, help=f"Of {', '.join(DEVICES)}.")] = "a100-80gb"
    predict: Annotated[bool, option("--predict", panel="Output", help="Forerun's kernels on four cards.")] = False
    out: Out = Path("runs/capacity")

    contexts, counts = Listed("context", contexts_in), numbers_of("devices", int, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for shape in self.model_shape or ():
            ModelShape.parse(shape)
        if self.device_kind not in DEVICES:
            raise ValueError(f"a device is {self.device_kind!r}; known are {', '.join(DEVICES)}")
        for name in ("weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0")

    def shapes(self) -> dict[str, ModelShape]:
        types = {"weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes}
        return {name: replace(ModelShape.parse(name), **types) for name in self.model_shape or MODELS}


def run(options: CapacityOptions) -> None:
    machines = [Machine(DEVICES[options.device_kind], count) for count in options.counts]
    shapes = options.shapes()
    for shape, machine in product(shapes.values(), machines):
        machine.check(shape)
    rows = list[Row]()
    for (name, shape), context, machine in product(shapes.items(), options.contexts, machines):
        rows.append({"model": name} | capacity_row(shape, context, options.rows, machine))
    report = Report.of("Capacity", options, "capacity")
    report.add("capacity", "What a model needs", rows, listing(rows, COLUMNS))
    if options.predict:
        add_predicted(report)
    report.end()


def capacity_row(shape: ModelShape, context: int, rows: int, machine: Machine) -> Row:
    """Return gigabytes, what fits, and the most tokens a second of all rows."""
    held, found = kv_bytes(shape, context, rows), fit(shape, machine, context, rows)
    row = {
        "context": context, "weights": round(shape.stored_bytes / 1e9, 1),
        "kv_kilobytes": round(shape.token_kv_bytes / 1e3, 1), "kv": round(held / 1e9, 2),
        "read": round((shape.pass_bytes + held) / 1e9, 2), "devices": machine.devices, "fits": found.words,
    }  # fmt: skip
    if found.possible:
        row["rate"] = float(f"{rows / least_seconds(shape, machine, context, rows, found):.3g}")
    return row
