"""MTP layers in files of Qwen3-Next, Qwen3.5, 3.6 and 3.8, which transformers leaves out.

``fc`` joins two norms, of a token's embedding and of the target's hidden state before it; a decoder layer with full
attention and ``norm`` follow. transformers' ``MtpModel`` computes just that (DeepSeek-V3, section 2.2), so it is used,
with the target's classes of decoder layer and experts. Safetensors files name the tensors ``mtp.*``; GGUF files have a
block after the decoder's, or only that block in a separate file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform, convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from forerun.models.forward.architecture import text_config
from forerun.models.loading import gguf
from forerun.models.loading.load import find
from forerun.models.loading.stored_weights import StoredLinear

if TYPE_CHECKING:
    from forerun.models.loading.gguf import Header

STATED = "mtp_num_hidden_layers"
"""Qwen's configuration entry with the number of MTP layers."""
PREFIX = "mtp."
FULL_ATTENTION = "full_attention"
PARTS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""Parts around the decoder layer: transformers' names, and those in safetensors files."""
BESIDE = "mtp-"
"""Prefix by which llama.cpp's converter names files with only an MTP layer."""


def load_qwen_mtp(model: PreTrainedModel) -> MtpModel | None:
    """Load the MTP layer from the target's files: a folder, the Hugging Face cache, or a GGUF file.

    Return transformers' model on the target's device, with the target's embeddings, head and rotary positions,
    quantised if the target is; None if there is no such layer. Raise ValueError for a tensor that is missing,
    unexpected or of another shape than configured; for several layers; for dedicated embeddings.
    """
    stated, place = int(getattr(text_config(model), STATED, None) or 0), model.name_or_path
    if stated > 1:
        raise ValueError(
            f"{STATED} is {stated} in {place}; only 1 is supported: released models have one, and "
            "other programs do not agree on what a second one reads"
        )
    if getattr(text_config(model), "mtp_use_dedicated_embeddings", None):
        raise ValueError(
            f"mtp_use_dedicated_embeddings is true in {place}; only an MTP layer with the target's embeddings is "
            "supported"
        )
    source = find(place) if place else None
    if source is None:
        return None
    heads = _from_file(model, source) if source.is_file() else _from_folder(model, source)
    if heads is None and stated:
        where = f"{source} has no tensors {PREFIX}*"
        if source.is_file():
            where = f"neither {source} nor a file {BESIDE}*{gguf.GGUF_SUFFIX} beside it has tensors blk.*.nextn.*"
        raise ValueError(f"the configuration of {type(model).__name__} states an MTP layer, and {where}")
    if heads is not None:
        heads.embed_tokens, heads.shared_head = model.get_input_embeddings(), model.get_output_embeddings()
    return heads


def _without_weights(model: PreTrainedModel, dtype: torch.dtype) -> MtpModel:
    """Make transformers' model of one layer on the meta device, without embeddings and head."""
    decoder, config = model.get_decoder(), deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or [FULL_ATTENTION] * len(decoder.layers)
    layers = [layer for layer, kind in zip(decoder.layers, kinds, strict=True) if kind == FULL_ATTENTION]
    if not layers:
        raise ValueError(f"{type(model).__name__} has an MTP layer, but no layer with full attention to model it on")
    text.num_mtp_layers, text.mtp_layer_types = 1, [FULL_ATTENTION]
    text.rms_norm_eps = getattr(text, "norm_eps", None) or text.rms_norm_eps  # MtpModel does not read LFM2's name
    target = SimpleNamespace(
        config=config,
        lm_head=nn.Identity(),
        get_input_embeddings=nn.Identity,
        get_decoder=lambda: SimpleNamespace(layers=layers, rotary_emb=decoder.rotary_emb),
    )
    with ContextManagers(MtpModel.get_init_context(dtype, False, False, None)):
        return MtpModel(target, 1)


def _from_folder(model: PreTrainedModel, folder: Path) -> MtpModel | None:
    tensors = _safetensors(folder)
    if not tensors:
        return None
    known = tuple(f"{part}." for part in (*PARTS.values(), "layers.0"))
    strange = sorted(name for name in tensors if not name.removeprefix(PREFIX).startswith(known))
    if strange:
        raise ValueError(f"the MTP layer in {folder} has an unknown tensor: {strange[0]}")
    heads = _without_weights(model, model.dtype)
    mapping = get_model_conversion_mapping(heads, add_legacy=False)
    mapping += get_checkpoint_conversion_mapping(text_config(model).model_type) or []
    _fill(heads, tensors, mapping, folder, model.device, _in_safetensors)
    return heads


def _safetensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(PREFIX)]  # noqa: SIM118  # no dictionary
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    return tensors


def _fill(
    heads: MtpModel,
    tensors: Mapping[str, torch.Tensor],
    mapping: list[WeightTransform],
    place: Path,
    device: torch.device,
    name_in_file: Callable[[str], str],
) -> None:
    """Load a file's tensors into the layer, by transformers' operations; raise ValueError naming a wrong one."""
    dtype = next(heads.layers.parameters()).dtype
    settings = LoadStateDictConfig(weight_mapping=mapping, device_map={"": device}, dtype=dtype)
    found, _ = convert_and_load_state_dict_in_model(heads, dict(tensors), settings)
    for name, reason in sorted(found.conversion_errors.items()):
        raise ValueError(f"the MTP layer in {place}: {name_in_file(name)} cannot be assembled: {reason}")
    for name, there, expected in sorted(found.mismatched_keys):
        raise ValueError(
            f"the MTP layer in {place} has {name_in_file(name)} of shape {[*there]}; the configuration says "
            f"{[*expected]}"
        )
    for word, names in (("lacks", found.missing_keys), ("has an unknown tensor,", found.unexpected_keys)):
        for name in sorted(names):
            raise ValueError(f"the MTP layer in {place} {word} {name_in_file(name)}")


def _in_safetensors(name: str) -> str:
    """Name one of transformers' parameters as in safetensors files."""
    rest = name.removeprefix("layers.0.")
    part, _, leaf = rest.partition(".")
    return f"{PREFIX}{PARTS[part]}.{leaf}" if part in PARTS else f"{PREFIX}layers.0.{rest.removeprefix('mtp_block.')}"


def _from_file(model: PreTrainedModel, file: Path) -> MtpModel | None:
    """Load the layer from a GGUF file, or one beside it: quantised if the target is, else dequantised."""
    block, architecture = int(text_config(model).num_hidden_layers), gguf.read_header(file).architecture
    part = _part(file, block)
    if part is None and (beside := _file_beside(file)) is not None:
        file, part = beside, _part(beside, block)
        if part is not None and part.architecture != architecture:
            raise ValueError(f"{file} is of {part.architecture}, and the model is of {architecture}")
    if part is None:
        return None
    from forerun.models.loading import as_stored, gguf_layout  # these need gguf, which may not be installed

    if not gguf_layout.has_operations(architecture):
        raise ValueError(f"{file} has an MTP layer of {architecture}, which is not supported in GGUF files")
    heads = _without_weights(model, torch.float32)
    mapping = gguf_layout.predictor_mapping(architecture, heads.config, block)
    stored = next((each for each in model.modules() if isinstance(each, StoredLinear)), None)
    if stored is None:
        data = np.memmap(file, np.uint8, "r")
        tensors = {name: torch.from_numpy(as_stored.floats_of(data, part, each)) for name, each in part.tensors.items()}
        _fill(heads, tensors, mapping, file, model.device, lambda name: f"blk.{block} {name.removeprefix('layers.0.')}")
        return heads
    as_stored.check_formats(file, part)
    as_stored.fill(file, part, heads, gguf_layout.OperationsLayout(mapping, heads), quantised=stored.quantised)
    return heads.requires_grad_(False)


def _part(file: Path, block: int) -> Header | None:
    """Return a file's header with only the tensors of the MTP layer, which is this block; None without one."""
    header = gguf.check(file)
    tensors = {name: each for name, each in header.tensors.items() if name.startswith(f"blk.{block}.")}
    return replace(header, tensors=tensors) if any(".nextn." in name for name in tensors) else None


def _file_beside(file: Path) -> Path | None:
    """Return the MTP file beside a model's: with the model's name, or the only one. Raise ValueError if unclear."""
    named = file.with_name(f"{BESIDE}{file.name}")
    files = [named] if named.is_file() else sorted(file.parent.glob(f"{BESIDE}*{gguf.GGUF_SUFFIX}"))
    if len(files) > 1:
        raise ValueError(
            f"beside {file} are {len(files)} files with MTP layers, {', '.join(each.name for each in files)}; name "
            f"the one of this model {named.name}"
        )
    return files[0] if files else None
