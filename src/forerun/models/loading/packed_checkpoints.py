"""Dequantise folders of GPTQ and AWQ, whose integers are packed into words of 32 bits, tensor by tensor.

A matrix ``[O, K]`` is ``scale * (q - zero)`` with integers q of 2, 4 or 8 bits, and a scale and a zero point per column
of ``O`` and group of inputs. Its tensors, with ``b`` integers in a word, the first in the lowest bits:

    qweight  GPTQ: int32 [K / b, O], packed along K     AWQ: int32 [K, O / b], packed along O in another order
    qzeros   int32 [groups, O / b]                      (GPTQ's first version stores zero points less one)
    scales   float [groups, O]
    g_idx    GPTQ: int32 [K], the group of each input; without it, and for AWQ, groups are of consecutive inputs

The product has at most 20 bits for scales of 16 bits, so it is exact in float32, and in float16 it has the bits that
GPTQModel and AutoAWQ multiply by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

PACKED = ("gptq", "awq")
"""Methods dequantised here."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight consecutive integers of an AWQ word is, counted from its lowest bits."""
SHARD_INDEX = "model.safetensors.index.json"
UNQUANTISED_INSTEAD = (
    "give the folder that it was made from, with --quantize q4_0 or q8_0 on a CPU, or a GGUF file of the model"
)
SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class PackedLayout:
    """How a folder's matrices are packed; ``group_size`` None means one group."""

    folder: Path
    method: str
    bits: int
    group_size: int | None
    offset: int
    """Added to stored zero points."""

    @classmethod
    def stated(cls, folder: Path, config: Mapping[str, Any]) -> PackedLayout:
        """Read a ``quantization_config``. Raises ``ValueError`` for a variant that is not supported, with its name."""
        method = config["quant_method"]
        gptq = method == "gptq"
        bits, size = config.get("bits", 4), config.get("group_size", 128)
        form = str(config.get("checkpoint_format") or config.get("format") or config.get("version") or method).lower()
        allowed: dict[str, tuple[Any, ...]] = {
            "bits": (2, 4, 8) if gptq else (4,),
            "checkpoint_format" if gptq else "version": ("gptq", "gptq_v2") if gptq else ("awq", "gemm"),
            "dynamic": (None, {}),
        }
        found = {"bits": bits, "checkpoint_format" if gptq else "version": form, "dynamic": config.get("dynamic")}
        for name, value in found.items():
            if value not in allowed[name]:
                listed = " or ".join(str(each) for each in allowed[name] if each)
                raise ValueError(
                    f"{folder} is quantised by {method} with {name} {value!r}; supported is "
                    f"{listed or 'a single number of bits for all layers'}; {UNQUANTISED_INSTEAD}"
                )
        if not isinstance(size, int) or size == 0 or size < -1:
            raise ValueError(f"{folder} is quantised by {method} with group_size {size!r}; it must be positive or -1")
        return cls(folder, method, bits, None if size == -1 else size, 1 if form == "gptq" else 0)

    @property
    def per_word(self) -> int:
        """Integers in a word."""
        return 32 // self.bits

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """Return the integers of words ``[..., n]``, as ``[..., n * per_word]`` in the order of the matrix."""
        order = AWQ_ORDER if self.method == "awq" else range(self.per_word)
        shifts = torch.tensor([self.bits * place for place in order], dtype=torch.int32)
        return ((words.unsqueeze(-1) >> shifts) & (1 << self.bits) - 1).flatten(-2)


class PackedMatrix:
    """A matrix dequantised when it is read by ``[...]``, as transformers reads slices of a safetensors file; raises
    ``ValueError`` with the name of a tensor that is missing or does not fit."""

    def __init__(self, packing: PackedLayout, name: str, parts: Mapping[str, Any]) -> None:
        self._packing, self._name, self._parts = packing, name, parts
        for part in ("qweight", "qzeros", "scales"):
            if part not in parts:
                raise self._wrong(part, "is missing")
        gptq, per_word = packing.method == "gptq", packing.per_word
        groups, self._rows = self._shape("scales", tuple(SCALE_TYPES))
        first, second = self._shape("qweight", ("I32",))
        self._columns = first * per_word if gptq else first
        self._check("qweight", [first, second], [first, self._rows if gptq else self._rows // per_word])
        self._check("qzeros", self._shape("qzeros", ("I32",)), [groups, self._rows // per_word])
        if self._rows % per_word:
            raise self._wrong("scales", f"has {self._rows} columns, which are no whole words of {per_word} integers")
        self._groups = self._groups_of_inputs(groups)
        self._zeros = packing.unpack(parts["qzeros"][...])
        most = 1 << packing.bits
        if packing.offset and (self._zeros == most - 1).any():
            raise self._wrong(
                "qzeros", f"has zero points that some programs read as 0 and others as {most}; {UNQUANTISED_INSTEAD}"
            )
        self._zeros += packing.offset

    @property
    def dtype(self) -> torch.dtype:
        """The type of the scales."""
        return SCALE_TYPES[self._parts["scales"].get_dtype()]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Return the matrix ``[O, K]``, float32."""
        words, scales = self._parts["qweight"][...], self._parts["scales"][...].float()
        integers = (
            self._packing.unpack(words.t()) if self._packing.method == "gptq" else self._packing.unpack(words).t()
        )
        weight: torch.Tensor = (integers - self._zeros.t()[:, self._groups]).mul(scales.t()[:, self._groups])
        return weight.contiguous()

    def _groups_of_inputs(self, groups: int) -> torch.Tensor:
        size = self._packing.group_size or self._columns
        if "g_idx" not in self._parts:
            if groups != -(-self._columns // size):
                raise self._wrong("scales", f"has {groups} groups, and {self._columns} inputs in groups of {size}")
            return torch.arange(self._columns) // size
        self._check("g_idx", self._shape("g_idx", ("I32",)), [self._columns])
        found: torch.Tensor = self._parts["g_idx"][...].long()
        if found.min() < 0 or found.max() >= groups:
            raise self._wrong("g_idx", f"has values from {found.min()} to {found.max()}, and there are {groups} groups")
        return found

    def _shape(self, part: str, types: tuple[str, ...]) -> list[int]:
        shape, kind = list(self._parts[part].get_shape()), self._parts[part].get_dtype()
        if kind not in types:
            raise self._wrong(part, f"has the type {kind}; it must be {' or '.join(types)}")
        if len(shape) != (1 if part == "g_idx" else 2):
            raise self._wrong(part, f"has the shape {shape}")
        return shape

    def _check(self, part: str, shape: list[int], expected: list[int]) -> None:
        if shape != expected:
            raise self._wrong(part, f"has the shape {shape}, and the other tensors ask for {expected}")

    def _wrong(self, part: str, what: str) -> ValueError:
        return ValueError(f"{self._packing.folder}: tensor {self._name}.{part} {what}")


def unpacked(packing: PackedLayout) -> dict[str, Any]:
    """Return a folder's tensors by their names in an ordinary checkpoint, none of them read yet."""
    tensors: dict[str, Any] = {}
    for file in _files(packing.folder):
        opened: Any = safe_open(file, framework="pt")
        tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    named: dict[str, dict[str, Any]] = {}
    for name in [*tensors]:
        owner, _, part = name.rpartition(".")
        if part in ("qweight", "qzeros", "scales", "g_idx"):
            named.setdefault(owner, {})[part] = tensors.pop(name)
    matrices = {f"{owner}.weight": PackedMatrix(packing, owner, parts) for owner, parts in named.items()}
    if not matrices:
        raise ValueError(f"{packing.folder} is said to be quantised by {packing.method}, and has no qweight tensor")
    return tensors | matrices


def type_of_scales(tensors: Mapping[str, Any]) -> torch.dtype:
    """Return the type in which the method's own programs multiply."""
    return next(each.dtype for each in tensors.values() if isinstance(each, PackedMatrix))


def check_unused(packing: PackedLayout, tensors: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ``ValueError`` for a tensor that the model lacks, unless it is zero: some programs write such biases."""
    for name in sorted(names):
        if isinstance(tensors[name], PackedMatrix) or tensors[name][...].any():
            raise ValueError(f"{packing.folder}: the model has no place for tensor {name}")


def _files(folder: Path) -> list[Path]:
    index = folder / SHARD_INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    for name in names:
        if not (folder / name).exists():
            raise ValueError(f"{folder} lacks {name}, which {SHARD_INDEX} names")
    return [folder / name for name in names]
