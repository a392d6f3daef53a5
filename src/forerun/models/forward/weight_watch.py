"""Detect changes of a model: of modules, code, settings, and weights and their places.

Changed weights are detected by torch's count of changes (``_version``), and by a checksum over samples of memory,
because changes through ``.data``, NumPy views and other programs are not counted. An uncounted change of a few single
weights or rows may go unnoticed (``memory_samples.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from forerun.kernels.runtime.memory_samples import address_table, checksum

SOURCES = ("transformers.", "torch.nn.modules.", "forerun.models.loading.stored_weights")
"""Packages of supported modules. Others may have private settings, such as which adapter is in use."""
CAPTURING = "transformers.utils.output_capturing"
"""Hooks of this module only record, and only while transformers records hidden states."""
ALL_MODULES_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)


def added_code(module: nn.Module) -> list[Any]:
    """Return what calling the module runs besides its class's ``forward``, except hooks that transformers left."""
    own = module.__dict__.get("forward")
    every = (module._forward_pre_hooks, module._forward_hooks, *ALL_MODULES_HOOKS)
    found = [hook for hooks in every for hook in _added(hooks)]
    return found if own is None else [*found, own]


def _added(hooks: dict[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if getattr(hook, "__module__", "") != CAPTURING]


BOOKKEEPING = frozenset(vars(nn.Module())) | {
    "name_or_path", "warnings_issued", "_is_hf_initialized", "_output_capturing_hooks_installed",
    "_forerun_engines", "_forerun_gpu", "_forerun_parallel",
}  # fmt: skip
"""Attributes of modules that are torch's or our own, or that no pass reads."""


def settings(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's attributes of plain values, and dictionaries and lists of these."""
    return {name: value for name, value in members.items() if _is_setting(name, value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


class Change(Enum):
    """``WEIGHTS``: parameters' values changed in place, where programs read them; ``MODEL``: any other change."""

    WEIGHTS = 1
    MODEL = 2


class WeightWatch:
    """A record of a model at construction, to detect changes. It keeps dictionaries of attributes, modules and hooks:
    collecting them again costs more than a small model's pass. Weights are not kept alive."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._config = model, copy.deepcopy(vars(model.config))
        modules = list(model.modules())
        self._members = [(module.__dict__, _snapshot(module.__dict__)) for module in modules]
        self._forwards = [(kind, kind.forward) for kind in {type(module) for module in modules}]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += ALL_MODULES_HOOKS
        self._code = self._added_code()
        self._parents = [module._modules for module in modules]
        self._modules = self._children()
        self._weights = _Memory([module._parameters for module in modules], True)
        loose = [{name: value for name, value in members.items() if isinstance(value, torch.Tensor)}
                 for members, _ in self._members]  # fmt: skip
        self._buffers = _Memory([*(module._buffers for module in modules), *filter(None, loose)], False)

    def look(self) -> Change | None:
        """Return what has changed since the last call, or None. After ``Change.MODEL``, use a new watch."""
        same = (
            self._modules == self._children()
            and self._code == self._added_code()
            and all(kind.forward is forward for kind, forward in self._forwards)
            and self._config == vars(self._model.config)
            and self._weights.stays()
            and self._buffers.stays()
            and self._same_settings()
            and self._buffers.same_values()
        )
        if not same:
            return Change.MODEL
        return None if self._weights.same_values() else Change.WEIGHTS

    def _children(self) -> list[Any]:
        return [module for parent in self._parents for module in parent.values()]

    def _added_code(self) -> list[Any]:
        return [hook for hooks in self._hooks if hooks for hook in _added(hooks)]

    def _same_settings(self) -> bool:
        for number, (members, before) in enumerate(self._members):
            if not _equal(members, before):
                if _contents(members) != _contents(before):
                    return False
                self._members[number] = members, _snapshot(members)
        return True


class _Memory:
    """Tensors in dictionaries: their places and contents. ``counts`` says whether torch's counts of changes matter."""

    def __init__(self, owners: list[dict[str, Any]], counts: bool) -> None:
        self._owners, self._counts = owners, counts
        tensors = self._tensors()
        self._places, self._versions = _places(tensors), self._counted(tensors)
        self._table = address_table(_apart(tensors))
        self._sum = self._checksum(tensors)

    def stays(self) -> bool:
        return self._places == _places(self._tensors())

    def same_values(self) -> bool:
        """Return whether values are unchanged since the last call, as far as detectable; places must be unchanged."""
        tensors = self._tensors()
        before = self._versions, self._sum
        self._versions, self._sum = self._counted(tensors), self._checksum(tensors)
        return before == (self._versions, self._sum)

    def _counted(self, tensors: list[torch.Tensor]) -> list[int]:
        """Return versions of parameters. Buffers' are ignored: models write the same values in every pass."""
        return _versions(tensors) if self._counts else []

    def _checksum(self, tensors: list[torch.Tensor]) -> int:
        return checksum((), self._table) if self._table is not None else checksum(_apart(tensors))

    def _tensors(self) -> list[torch.Tensor]:
        return [t for owner in self._owners if owner for t in owner.values() if t is not None]


def _snapshot(members: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) if _is_setting(name, value) else value for name, value in members.items()}


def _is_setting(name: str, value: Any) -> bool:
    return name not in BOOKKEEPING and _is_plain(value)


def _equal(members: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return members == before
    except Exception:  # tensors and arrays that differ have no single answer
        return False


def _contents(members: dict[str, Any]) -> dict[str, Any]:
    """Return what passes may read of a module's attributes: plain values, and identities of functions and tensors."""
    named = {
        name: id(value)
        for name, value in members.items()
        if name not in BOOKKEEPING and (callable(value) or isinstance(value, torch.Tensor))
    }
    return named | settings(members)


def _places(tensors: list[torch.Tensor]) -> list[Any]:
    return [(t.data_ptr(), t.stride()) for t in map(_local, tensors)]


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _apart(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor once, without those that have no memory here."""
    found = {(t.data_ptr(), t.nbytes): t.detach() for t in map(_local, tensors)}
    return [t for (address, _), t in found.items() if address]


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
