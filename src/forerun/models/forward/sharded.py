"""Models that transformers has cut into parts, one for each process (``DistributedConfig(tp_size=...)``)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether this process holds only a part of each layer."""
    return (model.tp_size or 1) > 1


def group_of(model: PreTrainedModel) -> dist.ProcessGroup:
    """The processes that hold a sharded model's parts."""
    group: dist.ProcessGroup = model._mesh_manager.get_mesh("tp").get_group()
    return group


def gather_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Logits ``[..., V]`` over the whole vocabulary. A plan may leave each process with those of its own tokens."""
    if isinstance(logits, DTensor):
        return logits.full_tensor()
    size = getattr(model.get_output_embeddings(), "out_features", logits.shape[-1])
    if not is_sharded(model) or logits.shape[-1] == size:
        return logits
    parts = -(-size // model.tp_size)  # the last process may have fewer
    mine = torch.nn.functional.pad(logits, (0, parts - logits.shape[-1])).contiguous()
    found = [torch.empty_like(mine) for _ in range(model.tp_size)]
    dist.all_gather(found, mine, group=group_of(model))
    return torch.cat(found, -1)[..., :size]
