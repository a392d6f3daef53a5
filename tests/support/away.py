"""A device that is none: tensors that say they lie on it, and a count of what is read back from there."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PLACE = torch.device("xpu")
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
FREE = {"__get__", "__repr__", "__format__", "dim", "size", "__len__"}


class Away(torch.Tensor):
    """Lies on the device, as far as anyone can tell."""


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Away)


def here(value: Any) -> Any:
    if isinstance(value, Away):
        return value.as_subclass(torch.Tensor)
    return type(value)(map(here, value)) if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


class Device(TorchFunctionMode):
    """While it is entered: ``reads`` are the names of what waited for the device. Devices do not mix, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return PLACE if isinstance(args[0], Away) else func(*args, **kwargs)
        if func == torch.Tensor.is_cpu.__get__:
            return not isinstance(args[0], Away)
        given = _tensors([*args, *kwargs.values()])
        away = any(isinstance(each, Away) for each in given)
        if name == "to" and isinstance(args[1], torch.device):
            return self._to(func, args, kwargs, away)
        if kwargs.get("device") == PLACE:
            assert not given
            return there(func(*args, **kwargs | {"device": "cpu"}))
        if not away or name in FREE:
            return func(*args, **kwargs)
        assert all(isinstance(each, Away) or not each.dim() for each in given), f"{name} mixes devices"
        if name in READS or (name == "__getitem__" and _masks(args[1])):
            assert name != "numpy", "it has to be brought to the CPU first"
            self.reads.append(name)
            return here(func(here(args[0]), *args[1:], **kwargs))
        return func(*args, **kwargs)

    def _to(self, func: Any, args: Any, kwargs: Any, away: bool) -> Any:
        to = args[1] == PLACE
        assert to or not away, "values go back by cpu()"
        if to and not away and not kwargs.get("non_blocking"):
            self.reads.append("to")  # a copy that waits
        return there(args[0]) if to else func(*args, **kwargs)


def _masks(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, torch.Tensor) and (each.dtype == torch.bool or not each.dim()) for each in parts)
