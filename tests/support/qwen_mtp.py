"""Random models of Qwen's families with an MTP layer, in files with the tensors' real names."""

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from support.heads import one_by_one
from support.saved_models import change
from support.tiny import HYBRIDS, build

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def empty_layer(model: PreTrainedModel) -> nn.Module:
    """A decoder layer of the model's family with full attention, without a cache."""
    config = deepcopy(model.config.get_text_config(decoder=True))
    config.layer_types, config._attn_implementation = ["full_attention"], "eager"
    config._experts_implementation = "eager"
    layer: nn.Module = type(model.get_decoder().layers[0])(config, 0).to(model.dtype).eval()
    return layer


def mtp_tensors(model: PreTrainedModel, seed: int = 7) -> dict[str, torch.Tensor]:
    """A random MTP layer as Qwen3.5's files have it: experts in one tensor, and norms to which 1 is added."""
    size = int(model.config.hidden_size)
    shapes = {f"layers.0.{name}": weight.shape for name, weight in empty_layer(model).named_parameters()}
    shapes |= {"fc.weight": torch.Size((size, 2 * size))}
    shapes |= {
        f"{name}.weight": torch.Size((size,)) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    generator = torch.Generator().manual_seed(seed)
    return {
        f"mtp.{name}": (torch.randn(shape, generator=generator) * 0.3).to(model.dtype) for name, shape in shapes.items()
    }


def qwen_target(folder: Path, family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random target with an MTP layer, loaded from its folder.

    Qwen3-Next's configuration does not state the layer, and its experts lie apart. Qwen3.5's states it, and the layer
    is in a file of its own.
    """
    whole = build(*HYBRIDS[family], seed=3)
    with torch.no_grad():  # new norms all are 1, and what they do would not be seen
        for name, weight in whole.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
    whole.save_pretrained(folder)
    tensors, mtp = load_file(folder / "model.safetensors"), mtp_tensors(whole)
    if family == "qwen3_next":
        save_file(tensors | one_by_one(mtp), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        save_file(mtp, folder / "mtp.safetensors", metadata={"format": "pt"})
        change(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    return reload(folder, type(whole), dtype)


def reload(folder: Path, model_class: type[PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    return model_class.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
