"""Options of how much memory the keys and values of texts may take, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from forerun.cli.sizes import size_of

_PANEL = "Memory"
SIZES = ("kv_memory", "kv_host_memory", "simulate_bandwidth")
"""The options that are sizes."""


@dataclass(frozen=True)
class MemoryOptions:
    """What does not fit on the device is brought in layer by layer."""

    ALONE: ClassVar[tuple[str, ...]] = ()
    """Options that may be given without ``--kv-memory``."""

    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            rich_help_panel=_PANEL,
            metavar="SIZE",
            help="For keys and values on the device, such as 20GiB; the rest lies in the host's memory.",
        ),
    ] = None
    kv_host_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-host-memory", rich_help_panel=_PANEL, metavar="SIZE", help="For that rest; by default no limit."
        ),
    ] = None
    kv_folder: Annotated[
        Path | None,
        typer.Option("--kv-folder", rich_help_panel=_PANEL, help="For a file with what does not fit there either."),
    ] = None
    simulate_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--simulate-bandwidth",
            rich_help_panel=_PANEL,
            metavar="SIZE",
            help="Bring in so many bytes a second, such as 1GB, and no more; on a CPU.",
        ),
    ] = None

    def sizes(self) -> dict[str, int]:
        """The options that are sizes, in bytes, as far as they are given.

        Raises:
            ValueError: for something that is no size, or others without ``--kv-memory``.
        """
        given = {name: getattr(self, name) for name in (*SIZES, "kv_folder") if getattr(self, name) is not None}
        rest = [name for name in given if name not in self.ALONE]
        if rest and self.kv_memory is None:
            raise ValueError(f"{_flag(rest[0])} is of what does not fit on the device; add --kv-memory")
        return {name: size_of(given[name], _flag(name)) for name in SIZES if name in given}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
