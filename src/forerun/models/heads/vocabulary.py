"""Which tokens a head knows, and whether it has matrices of its own for them or uses the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.models.heads.head import HeadFile


def known_tokens(file: HeadFile, known: int, vocabulary: int, folder: Path) -> torch.Tensor | None:
    """The target's id of each token that a head knows, int64 ``[known]``; None if it knows all.

    ``d2t`` in a head's file holds for each of its tokens how far on the target's id is.

    Raises:
        ValueError: if the map is missing, or names a token that the target does not have.
    """
    if known == vocabulary:
        return None
    tokens = torch.arange(known) + file.take("d2t", known).to(torch.int64)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError(f"d2t in {folder} names tokens outside of the vocabulary of {vocabulary}")
    return tokens


def own_matrix(
    file: HeadFile, name: str, shape: tuple[int, int], theirs: tuple[int, int], module: Any
) -> torch.Tensor | None:
    """A head's own embeddings or output matrix; None if it has none, or a copy of the target's.

    Training programs write a copy even of a matrix that they froze. It would be read from memory a second time.

    Args:
        file: of the head.
        name: of the tensor.
        shape: that it has.
        theirs: the shape of the target's matrix in its place.
        module: of the target, which has that matrix.

    Raises:
        ValueError: if it is missing where the target's does not fit, or has another shape.
    """
    if shape != theirs:
        return file.take(name, *shape)
    own, weight = file.find(name, *shape), getattr(module, "weight", None)
    if own is None or weight is None or own.shape != weight.shape or not weight.is_floating_point():
        return own
    return None if torch.equal(own.to(weight.device, weight.dtype), weight) else own
