"""A head's vocabulary, and whether it has matrices for it or uses the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from forerun.models.forward.scorer import Scorer
from forerun.models.heads.head_file import HeadFile


def known_tokens(file: HeadFile, known: int, vocabulary: int, folder: Path) -> torch.Tensor | None:
    """Return the target's id of each token that a head has, int64 ``[known]``, from the offsets ``d2t`` in the file;
    None if it has all. Raise ValueError if the map is missing, or names a token that the target lacks."""
    if known == vocabulary:
        return None
    tokens = torch.arange(known) + file.take("d2t", known).to(torch.int64)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError(f"d2t in {folder} names tokens outside of the vocabulary of {vocabulary}")
    return tokens


def own_matrix(
    file: HeadFile, name: str, shape: tuple[int, int], theirs: tuple[int, int], module: Any
) -> torch.Tensor | None:
    """Return a head's embeddings or output matrix; None if there is none, or a copy of the target's, which would be
    read from memory a second time. ``theirs`` is the shape of the target's matrix, in ``module``. Raise ValueError for
    another shape, or a missing matrix where the target's does not fit."""
    if shape != theirs:
        return file.take(name, *shape)
    own, weight = file.find(name, *shape), getattr(module, "weight", None)
    if own is None or weight is None or own.shape != weight.shape or not weight.is_floating_point():
        return own
    return None if torch.equal(own.to(weight.device, weight.dtype), weight) else own


def input_embeddings(target: Scorer, tokens: torch.Tensor) -> torch.Tensor:
    """Embed tokens with the target's matrix, without the factor that its module may apply."""
    module: Any = target.model.get_input_embeddings()
    weight = module.weight
    embedded: torch.Tensor = functional.embedding(tokens, weight) if weight.is_floating_point() else module(tokens)
    return embedded
