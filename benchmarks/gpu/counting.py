"""Counts of what a step waits for, and of kernels that are compiled."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forerun.core import sampling, transfers
from forerun.kernels.gpu.pass_tables import PassTables
from forerun.kv import cache, retrieval
from forerun.models.forward.cuda_graphs import GraphCache

READS = frozenset({"item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
"""Functions of a tensor that wait for its device."""
HOST_OPERATIONS = frozenset({"lift_fresh", "as_strided", "detach_"})
"""Operations that are no kernels, though torch does not call them views."""
WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))
"""Calls that wait for a device without reading a value."""


class WaitCounter(TorchFunctionMode):
    """A context that counts transfers and synchronisations in this thread.

    Args:
        device: transfers from it count. On a CPU no value has to be transferred, so reads are counted.

    Attributes:
        counts: by ``transfers`` and ``synchronisations``. On a GPU also by ``blocking``: operations of which torch's
            debug mode warns that they wait, such as copies from memory that is not pinned.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.counts, self._stack = device, Counter[str](), ExitStack()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.counts["synchronisations"] += 1
            return function(*arguments, **options)

        return call

    def __enter__(self) -> WaitCounter:
        for owner, name in WAITS:
            self._stack.enter_context(mock.patch.object(owner, name, self._counted(getattr(owner, name))))
        if self._device.type == "cuda":
            self._warned = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._device.type == "cuda":
            self.counts["blocking"] = sum("synchronizing" in str(each.message) for each in self._warned)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and isinstance(args[0], torch.Tensor):
            self.counts["transfers"] += args[0].device.type == self._device.type
        return func(*args, **(kwargs or {}))


class LaunchCounter(TorchDispatchMode):
    """A context that counts what the host gives a device to do besides replays, where the device is a CPU.

    Attributes:
        kernels: torch's operations that are kernels on a GPU, by name: all but views and new memory.
        copies: pieces of memory brought there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.copies, self._stack = Counter[str](), 0, ExitStack()

    def clear(self) -> None:
        """Begin anew."""
        self.kernels.clear()
        self.copies = 0

    def __enter__(self) -> LaunchCounter:
        for owner, name in ((PassTables, "fill"), (transfers, "brought"), (sampling, "brought"), (retrieval, "brought"),
                            (cache, "brought")):  # fmt: skip
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


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A context whose list gets the name of each kernel that Triton compiles, or loads, for the first time. Interpreted
    kernels are not compiled."""
    from triton import knobs

    found: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        found.append(fn.name)

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield found
