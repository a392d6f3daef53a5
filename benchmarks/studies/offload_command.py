"""``python -m benchmarks offload``: keys and values that are not on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from benchmarks.long_context.measured_model import LongStudyOptions, real_model, simulated_model
from benchmarks.papers.baselines import RECIPES
from benchmarks.reporting import plots
from benchmarks.reporting.common_options import list_option, numbers
from benchmarks.reporting.study_report import Delivery, Report
from benchmarks.studies.offload import OffloadBench, slow_link
from forerun.bench.machine import plain_values
from forerun.cli.models import check_drafters
from forerun.cli.options import MemoryOptions, Out
from forerun.engine.engine import Engine
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.models.forward import gate
from forerun.models.forward.architecture import dtype_name


@dataclass(frozen=True)
class OffloadOptions(LongStudyOptions, MemoryOptions):
    """Decoding with keys and values that are not on the device, compared with plain autoregression over the same ones.

    By default nothing of them stays but two layers, and on a CPU they come at a twentieth of the memory's bandwidth,
    which is measured. Each prompt is read once. Writes JSON, Markdown and a plot.
    """

    ALONE: ClassVar[tuple[str, ...]] = ("simulate_bandwidth",)

    drafters: Annotated[str, list_option("--drafters", "Model", "Names of recipes.")] = (
        "trie,retrieval,triforce-trie,auto"
    )
    out: Out = Path("runs/offload")

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers("--contexts", self.contexts, int, 64)
        self.check_memory()


def run(options: OffloadOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and a plot."""
    plots.check()
    drafters = [name.strip() for name in options.drafters.split(",")]
    check_drafters(drafters, options, RECIPES)
    contexts = sorted(numbers("--contexts", options.contexts, int, 64))
    if options.simulate_acceptance is None:
        measured = real_model(options, drafters, contexts[-1])
    else:
        measured = simulated_model(options, drafters)
    if measured.texts is not None:
        measured.texts.check(1, contexts[-1])
    shape = gate.admit(measured.model).kv
    bandwidth = options.simulate_bandwidth or slow_link(measured.model.device)
    settings = plain_values(options) | {"dtype": dtype_name(measured.model), "bandwidth": bandwidth}
    report = Report("Keys and values off the device", settings, measured.label)
    delivery = Delivery(report, options.out, "offload", options.json)
    bench = OffloadBench(drafters, measured.settings, options.rounds, delivery)
    for context in contexts:
        least = min_device_bytes(shape, context + options.room)
        device = least if options.kv_memory is None else options.kv_memory
        memory = KVMemory(device, options.kv_host_memory, options.kv_folder, bandwidth)
        engine = Engine(measured.model, "none", tokenizer=measured.tokenizer, kv_memory=memory)
        bench.take(engine, measured.read(engine, 0, context))
        for temperature in measured.temperatures(options.temperatures):
            bench.decode(temperature, measured.make(temperature))
        engine.close()
    delivery.end()
