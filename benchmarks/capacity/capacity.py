"""``python -m benchmarks capacity``: what models need on some devices, computed from their sizes.

Keys and values that do not fit on the devices stay in the host's memory. ``--predict`` adds what Forerun's GPU kernels
should cost (``benchmarks.capacity.gpu_cost``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.capacity.devices import DEVICES, Machine, fit, kv_bytes, least_seconds
from benchmarks.capacity.predicted import add_predicted
from benchmarks.capacity.shapes import SHAPES, ModelShape
from benchmarks.reporting.common_options import list_option, numbers
from benchmarks.reporting.study_report import Report, deliver, listing
from forerun.bench.machine import Row, plain_values
from forerun.cli.options import Out, OutputOptions, option
from forerun.models.loading.load import find

_DEVICE = "Devices"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-70b")
"""Shapes that are shown where none is named."""
UNLIKE = 0.01
"""Part of a model's weights that its shape may miss: norms and biases are far less, other architectures far more."""
COLUMNS = {
    "model": "model", "context": "context", "weights": "weights, GB", "kv_kilobytes": "KV of a token, kB",
    "kv": "KV of all rows, GB", "read": "a pass reads, GB", "devices": "devices", "fits": "fits",
    "rate": "plain, tokens/s at most",
}  # fmt: skip


@dataclass(frozen=True)
class CapacityOptions(OutputOptions):
    """What models need on some devices: bytes, what fits, and the most tokens a second without drafts.

    Computed from sizes alone, without weights. Writes JSON and Markdown; ``update-pages`` puts the tables of
    ``--predict`` into docs/scaling.md.
    """

    model_shape: Annotated[
        list[str] | None,
        option("--model-shape", panel="Model", metavar="NAME|SIZES", help=f"{', '.join(SHAPES)}, or layers,hidden,"
               f"intermediate,heads,kv_heads,vocabulary. May be repeated; default: {', '.join(MODELS)}."),
    ] = None  # fmt: skip
    model: Annotated[
        str | None,
        option("--model", "-m", panel="Model", metavar="FOLDER", help="Its config.json; no weights are read."),
    ] = None
    weight_bytes: Annotated[float, option("--weight-bytes", panel="Model", help="Of one weight.")] = 2.0
    kv_bytes: Annotated[float, option("--kv-bytes", panel="Model", help="Of one number of a key or value.")] = 2.0
    context: Annotated[str, list_option("--context", "Text", "Tokens of each row, such as 8K,1M.")] = "8K,128K,1M"
    rows: Annotated[int, option("--rows", panel="Text", help="That are decoded together.", min=1)] = 1
    devices: Annotated[str, list_option("--devices", _DEVICE, "How many hold the model together.")] = "1,8"
    device_kind: Annotated[str, option("--device-kind", panel=_DEVICE, help=f"Of {', '.join(DEVICES)}.")] = "a100-80gb"
    predict: Annotated[
        bool, option("--predict", panel="Output", help="What Forerun's kernels should cost on four cards.")
    ] = False  # fmt: skip
    out: Out = Path("runs/capacity")

    def __post_init__(self) -> None:
        self.contexts()
        numbers("--devices", self.devices, int, 1)
        for shape in self.model_shape or ():
            ModelShape.parse(shape)
        if self.model is not None and self.model_shape:
            raise ValueError("give --model or --model-shape, not both")
        if self.device_kind not in DEVICES:
            raise ValueError(f"a device is {self.device_kind!r}; known are {', '.join(DEVICES)}")
        for name in ("weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0")

    def contexts(self) -> list[int]:
        """Return the tokens of ``--context``: K is 1,024, M is 1,048,576; raise a ValueError for anything else."""
        parts = [re.fullmatch(r"([1-9]\d*)([KM]?)", part.strip().upper()) for part in self.context.split(",")]
        if any(part is None for part in parts):
            raise ValueError(
                f"--context is {self.context!r}; it must be numbers of tokens such as 8K,128K,1M with commas between"
            )
        return [int(part[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[part[2]] for part in parts if part is not None]

    def shapes(self) -> dict[str, ModelShape]:
        """Return the shapes by name, in the types that were given."""
        named = {name: ModelShape.parse(name) for name in self.model_shape or MODELS}
        found = named if self.model is None else {self.model: shape_of(self.model)}
        types = {"weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes}
        return {name: replace(shape, **types) for name, shape in found.items()}


class Case(NamedTuple):
    """A model after so many tokens of each of its rows."""

    model: str
    shape: ModelShape
    context: int
    rows: int


def run(options: CapacityOptions) -> None:
    """Compute, print the tables, and write JSON and Markdown."""
    machines = [Machine(DEVICES[options.device_kind], count) for count in numbers("--devices", options.devices, int, 1)]
    shapes = options.shapes()
    for shape in shapes.values():
        for machine in machines:
            machine.check(shape)
    cases = [
        Case(name, shape, context, options.rows) for name, shape in shapes.items() for context in options.contexts()
    ]
    rows = [capacity_row(case, machine) for case in cases for machine in machines]
    report = Report("Capacity", plain_values(options))
    report.add("capacity", "What a model needs", rows, listing(rows, COLUMNS))
    if options.predict:
        add_predicted(report)
    deliver(report, options.out, "capacity", options.json)


def capacity_row(case: Case, machine: Machine) -> Row:
    """Return what a model needs in gigabytes, what fits, and the most tokens a second of all rows."""
    model, shape, context, rows = case
    held, found = kv_bytes(shape, context, rows), fit(shape, machine, context, rows)
    row = {
        "model": model,
        "context": context,
        "weights": round(shape.stored_bytes / 1e9, 1),
        "kv_kilobytes": round(shape.token_kv_bytes / 1e3, 1),
        "kv": round(held / 1e9, 2),
        "read": round((shape.pass_bytes + held) / 1e9, 2),
        "devices": machine.devices,
        "fits": found.words,
    }
    if found.possible:
        seconds = least_seconds(shape, machine, context, rows, found)
        row["rate"] = float(f"{rows / seconds:.3g}")
    return row


def shape_of(folder: str) -> ModelShape:
    """Return the shape of a model, by its config.

    Raises:
        ValueError: if there is no such folder.
        NotImplementedError: for a model whose weights or keys are not those of such a shape.
    """
    found = find(folder)
    if found.is_file():
        raise NotImplementedError(f"{folder} is a file; give a folder with a config.json")
    config = AutoConfig.from_pretrained(found, local_files_only=True)
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise NotImplementedError(f"{folder}: some layers do not keep all keys and values, which is not computed here")
    with torch.device("meta"):
        counted = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    shape = ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        config.vocab_size,
        getattr(config, "head_dim", None),
        bool(config.tie_word_embeddings),
    )
    if abs(shape.weights / counted - 1) > UNLIKE:
        raise NotImplementedError(
            f"{folder} has {counted:,} weights and a Llama of its shape {shape.weights:,}: it is built otherwise"
        )
    return shape
