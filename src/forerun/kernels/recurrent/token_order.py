"""The order in which a recurrence goes over a draft tree, and the memory that its states need meanwhile.

A token's state follows from its parent's. A parent's state is kept until its last child has been computed. That child
takes it over in place, so a chain of any length needs the memory of one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.tree import IntArray

BEFORE = -1
"""Parent of the first token, and the place of its state: what the text before has left."""
UNSAVED = -1
"""Index of the saved state of a token whose state is not saved."""


@dataclass(frozen=True)
class TokenOrder:
    """Where each token finds its parent's state and where it leaves its own.

    Attributes:
        table: parent's place, own place and index of the saved state of each token, int64 ``[n, 3]``.
        places: how many states exist at the same time.
    """

    table: torch.Tensor
    places: int

    @classmethod
    def of(cls, parents: IntArray, saved: Mapping[int, int], device: torch.device) -> TokenOrder:
        """The order for these parents ``[n]``, parents first, in which some tokens' states are saved by index."""
        children = np.bincount(parents + 1, minlength=len(parents) + 1).tolist()
        rows, places, free = [], 0, list[int]()
        own: list[int] = []
        for token, parent in enumerate(parents.tolist()):
            source = BEFORE if parent < 0 else own[parent]
            children[parent + 1] -= 1
            if parent >= 0 and not children[parent + 1]:
                place = source
            elif free:
                place = free.pop()
            else:
                place, places = places, places + 1
            own.append(place)
            rows.append((source, place, saved.get(token, UNSAVED)))
            if not children[token + 1]:
                free.append(place)
        return cls(torch.tensor(rows, dtype=torch.int64, device=device), places)
