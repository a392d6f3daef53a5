"""Tables of what models take on devices, by ``benchmarks.capacity.forecast``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.capacity.capacity import Machine, devices_needed, kv_bytes
from benchmarks.capacity.forecast import Drafting, Forecast, forecast
from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row

SIZES = {
    "model": "model",
    "context": "context",
    "weights_gigabytes": "weights, GB",
    "kv_kilobytes_per_token": "KV a token, kB",
    "kv_gigabytes": "KV of all rows, GB",
    "gigabytes_per_pass": "a plain pass reads, GB",
    "gigaoperations_per_token": "operations a token, 10^9",
}
SPEEDS = {
    "model": "model",
    "context": "context",
    "devices": "devices",
    "fits": "fits",
    "plain": "plain, tokens/s",
    "drafted": "with drafts, tokens/s",
    "speed_up": "speed-up",
    "gamma1": "gamma1",
    "gamma2": "gamma2",
    "tokens_per_step": "tokens per step",
}


def add_sizes(report: Report, shapes: Mapping[str, ModelShape], contexts: Sequence[int], rows: int) -> None:
    """Bytes and operations, which no device changes."""
    found = [_size(name, shape, context, rows) for name, shape in shapes.items() for context in contexts]
    report.add("sizes", "What a model takes", found, listing(found, SIZES))


def _size(name: str, shape: ModelShape, context: int, rows: int) -> Row:
    held = kv_bytes(shape, context, rows)
    return {
        "model": name,
        "context": context,
        "weights_gigabytes": round(shape.stored_bytes / 1e9, 1),
        "kv_kilobytes_per_token": round(shape.token_kv_bytes / 1e3, 1),
        "kv_gigabytes": round(held / 1e9, 2),
        "gigabytes_per_pass": round((shape.pass_bytes + held) / 1e9, 2),
        "gigaoperations_per_token": round((shape.linear_operations + context * shape.pair_operations) / 1e9, 1),
    }


def add_speeds(
    report: Report,
    shapes: Mapping[str, ModelShape],
    contexts: Sequence[int],
    machines: Sequence[Machine],
    rows: int,
    drafting: Drafting,
) -> None:
    """What fits, and the most tokens a second."""
    found = [
        _speed(name, shape, forecast(shape, machine, context, rows, drafting), machine)
        for name, shape in shapes.items()
        for context in contexts
        for machine in machines
    ]
    report.add("speeds", "The most tokens a second of all rows", found, listing(found, SPEEDS))


def _speed(name: str, shape: ModelShape, found: Forecast, machine: Machine) -> Row:
    row: Row = {
        "model": name,
        "context": found.context,
        "devices": machine.devices,
        "fits": fits(shape, found, machine),
        "kept_gigabytes": round(found.fit.kept * machine.devices / 1e9, 2),
        "streamed_gigabytes": round(found.fit.streamed * machine.devices / 1e9, 2),
    }
    if found.fit.possible:
        row |= {"plain": _rounded(found.plain_rate), "plain_milliseconds": _rounded(1000 * found.plain_seconds)}
    if found.drafting_fit.possible:
        row |= {
            "drafted": _rounded(found.rate),
            "drafted_milliseconds": _rounded(1000 * found.rows / found.rate),
            "speed_up": _rounded(found.speed_up),
            "gamma1": found.step.gamma1,
            "gamma2": found.step.gamma2,
            "tokens_per_step": _rounded(found.step.tokens),
        }
    return row


def fits(shape: ModelShape, found: Forecast, machine: Machine) -> str:
    """What fits, in words."""
    if not found.fit.weights_fit:
        return f"no: the weights need {devices_needed(shape, machine.device)} devices"
    if not found.fit.host_fits:
        return f"no: {found.fit.streamed * machine.devices / 1e9:,.0f} GB more than devices and host hold"
    if found.fit.streamed:
        return f"{100 * found.fit.offloaded:.0f} % of KV in host memory"
    return "yes"


def _rounded(value: float) -> float:
    """Three digits: the model is not better than that."""
    return float(f"{value:.3g}")
