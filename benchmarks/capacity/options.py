"""Options of ``python -m benchmarks capacity``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.capacity.capacity import DEVICES
from benchmarks.capacity.shapes import SHAPES, ModelShape
from benchmarks.reporting.options import list_option, numbers
from forerun.cli.options import _LONG, _MODEL, _OUTPUT, _TEXT, Debug, Json
from forerun.cli.options import _option as option
from forerun.cli.sizes import size_of
from forerun.core.long_context import LongContextConfig, Sparse

_DEVICE = "Devices"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-70b")
"""Shapes that are shown where none is named."""


@dataclass(frozen=True)
class CapacityOptions:
    """What a model takes on which devices: bytes, what fits, and the most tokens a second, plain and with TriForce.

    Computed from sizes alone, without weights: how much passes must read, and how fast devices can. Writes JSON and
    Markdown; ``update-pages`` puts the tables of ``--published`` into docs/scaling.md.
    """

    model_shape: Annotated[
        list[str] | None,
        option("--model-shape", panel=_MODEL, metavar="NAME|SIZES", help=f"{', '.join(SHAPES)}, or layers,hidden,"
               f"intermediate,heads,kv_heads,vocabulary. May be repeated; default: {', '.join(MODELS)}."),
    ] = None  # fmt: skip
    model: Annotated[
        str | None,
        option("--model", "-m", panel=_MODEL, metavar="FOLDER", help="Its config.json; no weights are read."),
    ] = None
    weight_bytes: Annotated[float, option("--weight-bytes", panel=_MODEL, help="Of one weight.")] = 2.0
    kv_bytes: Annotated[float, option("--kv-bytes", panel=_MODEL, help="Of one number of a key or value.")] = 2.0
    context: Annotated[str, list_option("--context", _TEXT, "Tokens of each row, such as 8K,1M.")] = "8K,128K,1M"
    rows: Annotated[int, option("--rows", panel=_TEXT, help="That are decoded together.", min=1)] = 1
    devices: Annotated[str, list_option("--devices", _DEVICE, "How many hold the model together.")] = "1,8"
    device_kind: Annotated[str, option("--device-kind", panel=_DEVICE, help=f"Of {', '.join(DEVICES)}.")] = "a100-80gb"
    kv_memory: Annotated[
        str | None, option("--kv-memory", panel=_DEVICE, metavar="SIZE", help="Of one device for keys and values; by "
                           "default all that is left. The rest is in the host's memory.")
    ] = None  # fmt: skip
    acceptance: Annotated[
        float, option("--acceptance", panel=_LONG, help="Rate of the sparse cache's drafts.", min=0, max=1)
    ] = 0.9
    small_acceptance: Annotated[
        float, option("--small-acceptance", panel=_LONG, help="Rate of the small model's drafts.", min=0, max=1)
    ] = 0.45
    draft_shape: Annotated[
        str, option("--draft-shape", panel=_LONG, metavar="NAME|SIZES|none", help="Of the small model.")
    ] = "llama-68m"
    budget: Annotated[int, option("--budget", panel=_LONG, help="Tokens of the sparse cache.", min=1)] = (
        LongContextConfig.cache_budget
    )
    sparse: Annotated[Sparse, option("--sparse", panel=_LONG, help="The target's sparse cache.")] = "retrieval"
    gamma1: Annotated[
        int | None, option("--gamma1", panel=_LONG, help="Tokens drafted at a time; default: the best.", min=1)
    ] = None
    gamma2: Annotated[
        int | None, option("--gamma2", panel=_LONG, help="Tokens verified at a time; default: the best.", min=1)
    ] = None
    published: Annotated[
        bool, option("--published", panel=_OUTPUT, help="Compare with figures that others published.")
    ] = False
    out: Annotated[Path, option("--out", panel=_OUTPUT, help="Where the report goes.")] = Path("runs/capacity")
    json: Json = False
    debug: Debug = False

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
        if self.kv_memory is not None:
            size_of(self.kv_memory, "--kv-memory")
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
