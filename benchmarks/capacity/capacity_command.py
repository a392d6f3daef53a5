"""``python -m benchmarks capacity``: what a model takes on which devices, computed from its sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.capacity.capacity import DEVICES, Machine
from benchmarks.capacity.capacity_tables import add_sizes, add_speeds
from benchmarks.capacity.forecast import Drafting
from benchmarks.capacity.predicted import add_predicted
from benchmarks.capacity.published import add_published
from benchmarks.capacity.shapes import SHAPES, ModelShape
from benchmarks.reporting.common_options import list_option, numbers
from benchmarks.reporting.study_report import Report, deliver
from forerun.bench.machine import plain_values
from forerun.cli.options import LONG_PANEL, Out, OutputOptions, option, size_option
from forerun.core.long_context import LongContextConfig, Sparse
from forerun.models.loading.load import find

_DEVICE = "Devices"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-70b")
"""Shapes that are shown where none is named."""


@dataclass(frozen=True)
class CapacityOptions(OutputOptions):
    """What a model takes on which devices: bytes, what fits, and the most tokens a second, plain and with TriForce.

    Computed from sizes alone, without weights: how much passes must read, and how fast devices can. Writes JSON and
    Markdown; ``update-pages`` puts the tables of ``--predict`` into docs/scaling.md.
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
    kv_memory: Annotated[
        int | None, size_option(panel=_DEVICE, help="Of one device for keys and values; by default all that is left.")
    ] = None
    acceptance: Annotated[
        float, option("--acceptance", panel=LONG_PANEL, help="Rate of the sparse cache's drafts.", min=0, max=1)
    ] = 0.9
    small_acceptance: Annotated[
        float, option("--small-acceptance", panel=LONG_PANEL, help="Rate of the small model's drafts.", min=0, max=1)
    ] = 0.45
    draft_shape: Annotated[
        str, option("--draft-shape", panel=LONG_PANEL, metavar="NAME|SIZES|none", help="Of the small model.")
    ] = "llama-68m"
    budget: Annotated[int, option("--budget", panel=LONG_PANEL, help="Tokens of the sparse cache.", min=1)] = (
        LongContextConfig.cache_budget
    )
    sparse: Annotated[Sparse, option("--sparse", panel=LONG_PANEL, help="The target's sparse cache.")] = "retrieval"
    gamma1: Annotated[
        int | None, option("--gamma1", panel=LONG_PANEL, help="Tokens drafted at a time; default: the best.", min=1)
    ] = None
    gamma2: Annotated[
        int | None, option("--gamma2", panel=LONG_PANEL, help="Tokens verified at a time; default: the best.", min=1)
    ] = None
    published: Annotated[
        bool, option("--published", panel="Output", help="Compare with figures that others published.")
    ] = False
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
        if self.draft_shape != "none":
            ModelShape.parse(self.draft_shape)
        if self.device_kind not in DEVICES:
            raise ValueError(f"a device is {self.device_kind!r}; known are {', '.join(DEVICES)}")
        for name in ("weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0")

    def contexts(self) -> list[int]:
        """Tokens of ``--context``: K is 1,024, M is 1,048,576.

        Raises:
            ValueError: if they are no such numbers.
        """
        parts = [re.fullmatch(r"([1-9]\d*)([KM]?)", part.strip().upper()) for part in self.context.split(",")]
        if any(part is None for part in parts):
            raise ValueError(
                f"--context is {self.context!r}; it must be numbers of tokens such as 8K,128K,1M with commas between"
            )
        return [int(part[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[part[2]] for part in parts if part is not None]


UNLIKE = 0.01
"""Part of a model's weights that its shape may miss: norms and biases are far less, other architectures far more."""


def run(options: CapacityOptions) -> None:
    """Compute, print the tables, and write JSON and Markdown."""
    shapes = _shapes(options)
    machines = _machines(options)
    for shape in shapes.values():
        for machine in machines:
            machine.check(shape)
    report = Report("Capacity", plain_values(options))
    contexts = options.contexts()
    add_sizes(report, shapes, contexts, options.rows)
    add_speeds(report, shapes, contexts, machines, options.rows, _drafting(options))
    if options.predict:
        add_predicted(report)
    if options.published:
        add_published(report)
    deliver(report, options.out, "capacity", options.json)


def _shapes(options: CapacityOptions) -> dict[str, ModelShape]:
    """Shapes by name, in the types that were given."""
    named = {name: ModelShape.parse(name) for name in options.model_shape or MODELS}
    found = named if options.model is None else {options.model: shape_of(options.model)}
    return {name: _typed(shape, options) for name, shape in found.items()}


def _typed(shape: ModelShape, options: CapacityOptions) -> ModelShape:
    return replace(shape, weight_bytes=options.weight_bytes, kv_bytes=options.kv_bytes)


def _machines(options: CapacityOptions) -> list[Machine]:
    counts = numbers("--devices", options.devices, int, 1)
    return [Machine(DEVICES[options.device_kind], count, options.kv_memory) for count in counts]


def _drafting(options: CapacityOptions) -> Drafting:
    small = None if options.draft_shape == "none" else _typed(ModelShape.parse(options.draft_shape), options)
    return Drafting(
        options.acceptance,
        options.small_acceptance,
        small,
        options.budget,
        sparse=options.sparse,
        gamma1=options.gamma1,
        gamma2=options.gamma2,
    )


def shape_of(folder: str) -> ModelShape:
    """The shape of a model, by its config.

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
