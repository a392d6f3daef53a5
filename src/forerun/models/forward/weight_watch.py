"""Detects changes of a model: of its modules, their hooks, and the addresses of its weights.

A program of kernels holds addresses of weights. Weights may change in place. But it must not run if weights moved
(another type, another parameter, another module), or if there are hooks, which it would not call.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.models.forward.architecture import hooked


class WeightWatch:
    """Remembers a model as it is when this is made.

    Args:
        model: the model. Its dictionaries of modules, parameters and hooks are kept, because finding them again takes
            longer than a small model's pass.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._parents = [module._modules for module in modules if module._modules]
        self._owners = [module._parameters for module in modules if module._parameters]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._members = [module.__dict__ for module in modules]
        self._strange = any(hooked(module) for module in modules)
        self._modules, self._weights = self._children(), self._places()

    def same(self) -> bool:
        """Whether nothing has changed since, except weights in place."""
        return (
            self._weights == self._places()
            and self._modules == self._children()
            and self._strange == (any(self._hooks) or any("forward" in members for members in self._members))
        )

    def _children(self) -> list[Any]:
        return [module for parent in self._parents for module in parent.values()]

    def _places(self) -> list[int]:
        return [weight.data_ptr() for owner in self._owners for weight in owner.values() if weight is not None]
