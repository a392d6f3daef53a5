"""What decides the bits of a model's keys and values, as one short name: equal names, equal bits.

All weights are in it, byte by byte: a sample could miss the one row of an embedding that was trained anew. So is the
configuration, the processor, and the sources and packages that compute: kept keys are worth less than a wrong bit
costs, and a new version reads each text once more.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import forerun
from forerun.core.compiling import sources
from forerun.kernels.runtime.vector_ir import features, unusable
from forerun.models.forward.architecture import CHANGING, SOURCES, hooked
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.scorer import Scorer

COMPUTING = ("core", "kernels", "kv", "models")
"""Folders whose sources take part in computing keys and values."""
PACKAGES = ("torch", "transformers", "numba", "llvmlite")
ELSEWHERE = ("_name_or_path", "transformers_version")
"""Of a configuration, what says nothing about the model."""


def fingerprint(scorer: Scorer, exactness: Exactness) -> str:
    """A name for the bits of this model's keys and values, as this process computes them; 32 hexadecimal digits.

    It takes as long as reading all weights: SHA-256 at 1.8 GB a second and core.

    Raises:
        ValueError: if they depend on more than can be known: hooks, modules of other packages (adapters have a state of
            their own), or rotations that change with the text's length.
    """
    model = scorer.model
    reason = unknowable(model)
    if reason is not None:
        raise ValueError(f"keys and values of this model cannot be kept on disk: {reason}")
    digest = hashlib.blake2b(
        json.dumps(_about(scorer, exactness), sort_keys=True, default=str).encode(), digest_size=16
    )
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for found in threads.map(lambda item: _of(*item), _weights(model)):
            digest.update(found)
    return digest.hexdigest()


def unknowable(model: PreTrainedModel) -> str | None:
    """Why a model's keys and values may differ although all that ``fingerprint`` looks at is equal; None if not."""
    if any(weight.device.type != "cpu" for _, weight in _weights(model)):
        return "it is not on the CPU"
    if any(hooked(module) for module in model.modules()):
        return "its modules have hooks, or functions of their own"
    foreign = next((type(each) for each in model.modules() if not type(each).__module__.startswith(SOURCES)), None)
    if foreign is not None:
        return f"it has a {foreign.__module__}.{foreign.__qualname__}, whose code and state are not looked at"
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    turning = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    if CHANGING & turning:
        return "its rotations change with the length of the text"
    return None


def _about(scorer: Scorer, exactness: Exactness) -> dict[str, Any]:
    root = Path(forerun.__file__).parent
    config = scorer.model.config.to_dict()
    about: dict[str, Any] = {
        "config": {name: value for name, value in config.items() if name not in ELSEWHERE},
        "model": type(scorer.model).__qualname__,
        "scorer": type(scorer).__qualname__,
        "exactness": exactness.level,
        "sources": [sources(root / folder) for folder in COMPUTING],
        "packages": [version(name) for name in PACKAGES],
        "processor": [platform.machine(), features(), torch.backends.cpu.get_cpu_capability(), unusable()],
        "settings": [torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled()],
    }
    if exactness.level != "bitwise":  # then sums may be cut by threads
        about["threads"] = torch.get_num_threads()
    return about


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _of(name: str, weight: torch.Tensor) -> bytes:
    """A digest of a tensor; one that lies in columns is not copied."""
    turned = weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous()
    rows = (weight.t() if turned else weight).detach().contiguous()
    digest = hashlib.sha256(repr((name, str(weight.dtype), tuple(weight.shape), turned)).encode())
    digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
