"""The machine, versions and settings of a measurement, for every report."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
REPORTED_PACKAGES = ("forerun", "torch", "transformers", "numba", "numpy")
LEFT_OUT = ("json", "debug", "out")


def machine() -> Row:
    """Describe this machine in plain values."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gigabytes": _memory(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "system": platform.platform(),
        "python": platform.python_version(),
        **_versions(),
    }


def caption(settings: Row) -> str:
    """Return one line for a plot: the model, its type, the machine and the date."""
    here, model, dtype = machine(), settings.get("model"), settings.get("dtype")
    parts = [Path(model).name if model else None, dtype if dtype != "auto" else None, here["processor"]]
    parts.append(
        here["device"] if here["device"] != "cpu" else f"{here['threads']} thread{'s' * (here['threads'] != 1)}"
    )
    return ", ".join(each for each in [*parts, date.today().isoformat()] if each)


def _versions() -> dict[str, str]:
    known = {}
    for package in REPORTED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            known[package] = metadata.version(package)
    return known


def plain_values(options: Any) -> Row:
    """Convert a dataclass of options to plain values, for JSON."""
    values: Row = json.loads(json.dumps(asdict(options), default=str))  # a path becomes a string
    return values


def footer(settings: Row) -> str:
    """Return machine, versions and given settings as two lines of Markdown."""
    shown = {name: value for name, value in settings.items() if value is not None and name not in LEFT_OUT}
    return f"Machine: {_listed(machine())}\n\nSettings: {_listed(shown)}\n"


def _listed(values: Row) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_joined(value)}" for name, value in values.items())


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None
