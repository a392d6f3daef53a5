"""Name a model as this process computes it, so that equal names mean equal results.

``fingerprint`` names keys and values on disk. It covers every byte of the weights, because a sample could miss the one
retrained row of an embedding. ``of_results`` names startup results, and samples large weights: costs and exactness do
not depend on one row. Both cover configuration, modules' settings, processor, sources and packages.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import forerun
from forerun.core.compiling import sources
from forerun.kernels.runtime.vector_ir import features, unusable
from forerun.models.forward.architecture import CHANGING, dtype_name
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.weight_watch import SOURCES, added_code, settings

COMPUTING = ("core", "kernels", "kv", "models")
"""Folders whose sources compute logits, keys and values."""
MEASURING = (*COMPUTING, "policy")
"""Folders whose sources affect startup results."""
PACKAGES = ("torch", "transformers", "numba", "llvmlite", "triton")
CODE_PACKAGES = sys.stdlib_module_names | {
    "accelerate", "forerun", "huggingface_hub", "numpy", "packaging", "safetensors", "tokenizers", "torch",
    "transformers",
}  # fmt: skip
"""Packages whose functions may occur in modules that define a model's classes: what transformers imports."""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
ELSEWHERE = ("_name_or_path", "transformers_version")
"""Entries of a configuration that do not affect the model."""
WHOLE_BYTES = 1 << 16
"""Size up to which weights are read completely: norms, biases, and all of a tiny model."""
SAMPLES = 64
SAMPLE_BYTES = 256
"""Number of evenly spaced pieces of a larger weight, and bytes of each."""


def fingerprint(scorer: Scorer, exactness: Exactness) -> str:
    """Return a name for the bits of this model's keys and values in this process: 32 hexadecimal digits.

    Read all weights, at SHA-256's 1.8 GB/s per core. Raise ValueError if keys and values depend on hooks, modules of
    other packages (adapters have private state), or rotations that change with the sequence's length.
    """
    model = scorer.model
    reason = unknowable(model)
    if reason is not None:
        raise ValueError(f"keys and values of this model cannot be stored on disk: {reason}")
    about = _about(model, COMPUTING) | {
        "scorer": type(scorer).__qualname__, "exactness": exactness.level, "keys and values": scorer.kv_dtype,
    }  # fmt: skip
    if exactness.level != "bitwise":  # then sums may be cut by threads
        about["threads"] = torch.get_num_threads()
    digest = _digest_of(about)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for part in threads.map(lambda item: _of(*item), _weights(model)):
            digest.update(part)
    return digest.hexdigest()


def of_results(model: PreTrainedModel) -> str:
    """Return a name for a model's startup results, 32 hexadecimal digits, in milliseconds. It changes with weights,
    modules, hooks, code, device and threads. Other processes can trust it if ``unknowable_code`` returns None."""
    about = _about(model, MEASURING) | {
        "code": sorted({_code_of(type(module)) for module in model.modules()}),
        "hooks": [id(hook) for module in model.modules() for hook in added_code(module)],
        "implementation": [getattr(model.config, name, None) for name in IMPLEMENTATIONS],
        "device": str(model.device) + (torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""),
        "machine": _processor_name(),
        "threads": torch.get_num_threads(),
    }
    digest = _digest_of(about)
    for name, weight in _weights(model):
        digest.update(_of(name, weight, sampled=True))
    return digest.hexdigest()


def unknowable(model: PreTrainedModel) -> str | None:
    """Return why keys and values may differ despite equal fingerprints, or None."""
    if any(weight.device.type != "cpu" for _, weight in _weights(model)):
        return "it is not on the CPU"
    if (reason := unknowable_code(model)) is not None:
        return reason
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    turning = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    return "its rotations depend on the sequence's length" if CHANGING & turning else None


def unknowable_code(model: PreTrainedModel) -> str | None:
    """Return why the model may run code that neither its configuration nor a version identifies, or None."""
    if any(added_code(module) for module in model.modules()):
        return "its modules have hooks, or replaced functions"
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith(SOURCES):
            return f"it has a {kind.__module__}.{kind.__qualname__}, whose code and state are not checked"
        if (foreign := _foreign_function(kind)) is not None:
            return f"the code of {kind.__qualname__} was replaced by {foreign}"
    return None


def _foreign_function(kind: type[nn.Module]) -> str | None:
    module = sys.modules.get(kind.__module__)
    for each in (*vars(kind).values(), *(() if module is None else vars(module).values())):
        known = getattr(each, "__module__", "").partition(".")[0] in CODE_PACKAGES
        if isinstance(each, FunctionType) and not known:
            return f"{each.__module__}.{each.__qualname__}"
    return None


def _code_of(kind: type[nn.Module]) -> str:
    code = getattr(kind.forward, "__code__", None)
    where = None if code is None else (code.co_filename, code.co_firstlineno)
    return f"{kind.__module__}.{kind.__qualname__} {where}"


def _about(model: PreTrainedModel, folders: tuple[str, ...]) -> dict[str, Any]:
    root = Path(forerun.__file__).parent
    config, modules = model.config.to_dict(), list(model.named_modules())
    return {
        "config": {name: value for name, value in config.items() if name not in ELSEWHERE},
        "model": type(model).__qualname__,
        "modules": [(name, type(module).__qualname__, _sorted(settings(vars(module)))) for name, module in modules],
        "weights": dtype_name(model),
        "sources": [sources(root / folder) for folder in folders],
        "packages": _versions(),
        "processor": [platform.machine(), features(), torch.backends.cpu.get_cpu_capability(), unusable()],
        "settings": [torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled()],
    }


def _sorted(value: Any) -> Any:
    """Replace sets and dictionaries, whose order may differ between processes, by sorted lists."""
    if isinstance(value, Mapping):
        return sorted(((str(name), _sorted(each)) for name, each in value.items()), key=repr)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return [_sorted(each) for each in value] if isinstance(value, (list, tuple)) else value


def _digest_of(about: dict[str, Any]) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=16)


@cache
def _versions() -> list[str]:
    return [_version(name) for name in PACKAGES]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _of(name: str, weight: torch.Tensor, sampled: bool = False) -> bytes:
    """Return a tensor's digest, without copying a transposed matrix."""
    turned = weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous()
    rows = (weight.t() if turned else weight).detach()
    digest = hashlib.sha256(repr((name, str(weight.dtype), tuple(weight.shape), turned)).encode())
    read = rows.contiguous().reshape(-1).view(torch.uint8)
    if sampled and len(read) > WHOLE_BYTES:
        read = read[: len(read) // SAMPLES * SAMPLES].view(SAMPLES, -1)[:, :SAMPLE_BYTES].contiguous().view(-1)
    digest.update(read.cpu().numpy().data)
    return digest.digest()
