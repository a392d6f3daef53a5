"""Whether a model is still as it was: the same modules, weights in the same places, and no added code."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

SOURCES = ("transformers.", "torch.nn.modules.", "forerun.models.loading.stored_weights")
"""Packages of the modules that are known. Those of others may have settings of their own, such as which adapter is in
use."""
CAPTURING = "transformers.utils.output_capturing"
"""Hooks of this module only take notes, and only while transformers has been asked for hidden states."""
ALL_MODULES_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)
"""Where torch keeps the hooks that are called for every module of every model."""


def added_code(module: nn.Module) -> list[Any]:
    """What calling the module runs besides its class's ``forward``: hooks, and a ``forward`` of its own.

    Hooks that transformers leaves on a model once it was asked for hidden states are not among them. They do nothing
    outside such a call.
    """
    own = module.__dict__.get("forward")
    every = (module._forward_pre_hooks, module._forward_hooks, *ALL_MODULES_HOOKS)
    found = [hook for hooks in every for hook in _added(hooks)]
    return found if own is None else [*found, own]


def _added(hooks: dict[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if getattr(hook, "__module__", "") != CAPTURING]


def weights_version(model: PreTrainedModel) -> int:
    """A number that changes with the model's weights, hooks, and the settings of modules that are not of ``SOURCES``,
    for what was made with them. A change of weights through ``.data`` is not seen, which torch does not count."""
    weights = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in model.parameters()]
    code = [id(code) for module in model.modules() for code in added_code(module)]
    own = [_settings(module) for module in model.modules() if not type(module).__module__.startswith(SOURCES)]
    return hash((*weights, *code, *own))


def _settings(module: nn.Module) -> str:
    """A module's attributes of plain values, and dictionaries and lists of such."""
    return repr([(name, value) for name, value in vars(module).items() if _is_plain(value)])


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


class WeightWatch:
    """Remembers a model as it is when this is made: its modules, their hooks, its configuration, and the addresses of
    its weights.

    A program of kernels holds addresses of weights, and numbers that the model reads from its configuration in each
    pass (soft caps, windows). Weights may change in place. But it must not run if weights moved (another type, another
    parameter, another module), if the configuration changed, or if there are hooks, which it would not call.

    Args:
        model: the model. Its dictionaries of modules, weights, buffers and hooks are kept, because finding them again
            takes longer than a small model's pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._settings = model, copy.deepcopy(vars(model.config))
        modules = list(model.modules())
        self._parents = [module._modules for module in modules if module._modules]
        self._owners = [held for module in modules for held in (module._parameters, module._buffers) if held]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += ALL_MODULES_HOOKS
        self._members = [module.__dict__ for module in modules]
        self._strange = self._is_strange()
        self._modules, self._weights = self._children(), self._places()

    def same(self) -> bool:
        """Whether nothing has changed since, except weights in place."""
        return (
            self._weights == self._places()
            and self._modules == self._children()
            and self._strange == self._is_strange()
            and self._settings == vars(self._model.config)
        )

    def _is_strange(self) -> bool:
        """Whether calls would run added code."""
        return any("forward" in members for members in self._members) or any(
            hooks and _added(hooks) for hooks in self._hooks
        )

    def _children(self) -> list[Any]:
        return [module for parent in self._parents for module in parent.values()]

    def _places(self) -> list[int]:
        return [weight.data_ptr() for owner in self._owners for weight in owner.values() if weight is not None]
