"""``python -m benchmarks capacity``: what a model takes on which devices, computed from its sizes."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.capacity import report as tables
from benchmarks.capacity.capacity import DEVICES, Machine
from benchmarks.capacity.forecast import Drafting
from benchmarks.capacity.options import MODELS, CapacityOptions
from benchmarks.capacity.published import add_published
from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting.delivery import deliver
from benchmarks.reporting.options import numbers
from benchmarks.reporting.tables import Report
from forerun.bench.machine import plain_values
from forerun.cli.sizes import size_of
from forerun.models.loading.load import find

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
    tables.add_sizes(report, shapes, contexts, options.rows)
    tables.add_speeds(report, shapes, contexts, machines, options.rows, _drafting(options))
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
    room = None if options.kv_memory is None else size_of(options.kv_memory, "--kv-memory")
    counts = numbers("--devices", options.devices, int, 1)
    return [Machine(DEVICES[options.device_kind], count, room) for count in counts]


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
