"""Counts of what a step waits for."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

READS = frozenset({"item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
"""Functions of a tensor that wait for its device."""
WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))
"""Calls that wait for a device without reading a value."""


class WaitCounter(TorchFunctionMode):
    """A context that counts transfers and synchronisations in this thread.

    Args:
        device: transfers from it count. On a CPU no value has to be transferred, so reads are counted.

    Attributes:
        counts: by ``transfers`` and ``synchronisations``.
        reads: transfers, by the tensor's function.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.counts, self.reads, self._stack = device, Counter[str](), Counter[str](), ExitStack()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.counts["synchronisations"] += 1
            return function(*arguments, **options)

        return call

    def __enter__(self) -> "WaitCounter":
        for owner, name in WAITS:
            self._stack.enter_context(mock.patch.object(owner, name, self._counted(getattr(owner, name))))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and isinstance(args[0], torch.Tensor) and args[0].device.type == self._device.type:
            self.counts["transfers"] += 1
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))
