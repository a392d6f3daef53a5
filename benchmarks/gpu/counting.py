"""Counts of what a step waits for: values read from the device, and synchronisations."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
)
"""Functions of a tensor that wait for its device."""


class WaitCounter(TorchFunctionMode):
    """A context that counts transfers and synchronisations in this thread.

    Args:
        device: transfers from it count. On a CPU no value has to be transferred, so reads are counted.

    Attributes:
        counts: by ``transfers`` and ``synchronisations``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.counts = device, Counter[str]()
        self._patches = [
            mock.patch.object(torch.cuda, "synchronize", self._counted(torch.cuda.synchronize)),
            mock.patch.object(torch.cuda.Stream, "synchronize", self._counted(torch.cuda.Stream.synchronize)),
        ]

    def _counted(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.counts["synchronisations"] += 1
            return function(*arguments, **options)

        return call

    def __enter__(self) -> WaitCounter:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and isinstance(args[0], torch.Tensor):
            self.counts["transfers"] += args[0].device.type == self._device.type
        return func(*args, **(kwargs or {}))
