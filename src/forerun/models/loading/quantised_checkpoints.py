"""Choose what dequantises a folder's quantised weights, transformers or ``packed_checkpoints``, and reject others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from forerun.models.loading.packed_checkpoints import PACKED, UNQUANTISED_INSTEAD, PackedLayout

DEQUANTISED = ("fp8", "mxfp4", "mxfp8")
"""Methods that transformers dequantises without further packages. Scales of MXFP4 and MXFP8 are powers of two."""


def prepare(folder: Path, config: PreTrainedConfig) -> tuple[str | None, PackedLayout | None]:
    """Change ``config`` so that transformers dequantises what it can, or sees ordinary weights where this package does.

    Return the method, None for ordinary weights, and the packing if transformers cannot read it. Raise ValueError for
    an unsupported method or variant, with what to do.
    """
    stated: Any = getattr(config, "quantization_config", None)
    if stated is None:
        return None, None
    method = str(stated.get("quant_method", "bitsandbytes" if "load_in_4bit" in stated else "an unnamed method"))
    if method in PACKED:
        packing = PackedLayout.stated(folder, stated)
        del config.quantization_config
        return method, packing
    if method not in DEQUANTISED:
        raise ValueError(
            f"the weights in {folder} are quantised by {method}, for which there is no exact kernel here; allowed are "
            f"weights that are not quantised, and {', '.join((*DEQUANTISED, *PACKED))}, which are dequantised; "
            f"{UNQUANTISED_INSTEAD}"
        )
    config.quantization_config = stated | {"dequantize": True}
    return method, None


def make_ordinary(model: PreTrainedModel) -> None:
    """Let a dequantised model be moved, cast and saved like any other."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def name_after(model: PreTrainedModel, folder: Path) -> None:
    """Give a model that was not loaded by its folder's name that name, and the folder's generation settings."""
    model.name_or_path = str(folder)
    with suppress(OSError):  # there are none: they follow from the configuration
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
