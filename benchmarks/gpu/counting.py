"""Counts of what a step launches and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forerun.core import sampling, transfers
from forerun.kernels.gpu.pass_tables import PassTables
from forerun.kv import cache, retrieval
from forerun.models.forward.cuda_graphs import GraphCache

HOST_OPERATIONS = frozenset({"lift_fresh", "as_strided", "detach_"})
"""Operations that are no kernels, though torch does not call them views."""


class LaunchCounter(TorchDispatchMode):
    """Counts what the host gives a device to do besides replays, within this context and on a CPU.

    Attributes:
        kernels: torch's operations that are kernels on a GPU, by name: all but views and new memory.
        copies: pieces of memory copied there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.copies, self._stack = Counter[str](), 0, ExitStack()

    def clear(self) -> None:
        self.kernels.clear()
        self.copies = 0

    def __enter__(self) -> LaunchCounter:
        for owner, name in ((PassTables, "fill"), (transfers, "to_device"), (sampling, "to_device"),
                            (retrieval, "to_device"), (cache, "to_device")):  # fmt: skip
            self._stack.enter_context(mock.patch.object(owner, name, self._counted(getattr(owner, name), 1)))
        recorded = self._counted(GraphCache._recorded, 0)
        self._stack.enter_context(mock.patch.object(GraphCache, "_recorded", recorded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _counted(self, function: Callable[..., Any], copies: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before = self.copies
            with _disable_current_modes():  # what makes the piece is of the CPU
                found = function(*arguments, **options)
            self.copies = before + copies
            return found

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.__name__.partition(".")[0]
        same = isinstance(found, torch.Tensor) and any(found is each for each in args) and name == "to"
        if not (same or (func.is_view and name != "to") or "empty" in name or name in HOST_OPERATIONS):
            self.kernels[name] += 1
        return found
