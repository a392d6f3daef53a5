"""Dequantise folders with quantised weights where transformers does that on any device, and reject others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

DEQUANTISED = ("fp8", "mxfp4", "mxfp8")
"""Methods that transformers dequantises without further packages, by one multiplication per number. Scales of MXFP4 and
MXFP8 are powers of two, so nothing is rounded."""


def prepare(folder: Path, config: PreTrainedConfig) -> str | None:
    """Let transformers dequantise, by changing ``config``; return the method, or None. Raise ValueError if it
    cannot."""
    stated: Any = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    method = stated.get("quant_method", "bitsandbytes" if "load_in_4bit" in stated else "an unnamed method")
    if method not in DEQUANTISED:
        raise ValueError(
            f"the weights in {folder} are quantised by {method}, for which there is no exact kernel here; allowed are "
            f"weights that are not quantised, and {', '.join(DEQUANTISED)}, which are dequantised; give the folder "
            "that they were made from, with --quantize q4_0 or q8_0 on a CPU, or a GGUF file of the model"
        )
    config.quantization_config = stated | {"dequantize": True}
    return str(method)


def make_ordinary(model: PreTrainedModel) -> None:
    """Let a dequantised model be moved, cast and saved like any other."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
