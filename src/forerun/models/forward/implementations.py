"""Switches a model's attention and experts to Forerun's, inside a pass and in its thread only.

transformers asks the model's configuration at every layer for the implementation to use. All threads share this
configuration. If a pass changed it, another thread's ``model.generate`` would run with Forerun's attention; and of two
concurrent passes, the first to end would switch it off for the other. So the configuration is not changed. It answers
each thread separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class _Inside:
    """This thread's answers for a model's configurations, by their ids."""

    configs: frozenset[int]
    names: Mapping[str, str | None]


_inside: ContextVar[_Inside | None] = ContextVar("inside", default=None)


class _Answer:
    """A descriptor for a configuration's attribute: gives a thread inside a pass its own answer, others the value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, config: Any, owner: Any = None) -> Any:
        inside = _inside.get()
        if inside is not None and id(config) in inside.configs and self._name in inside.names:
            return inside.names[self._name]
        try:
            return config.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{type(config).__name__!r} has no attribute {self._name!r}") from None

    def __set__(self, config: Any, value: Any) -> None:
        config.__dict__[self._name] = value


for _name in ("_attn_implementation_internal", "_experts_implementation_internal"):
    setattr(PreTrainedConfig, _name, _Answer(_name))


@contextmanager
def use_implementations(model: PreTrainedModel, **names: str | None) -> Iterator[None]:
    """A context in which the model uses other implementations, in this thread only.

    Args:
        model: the model; its configuration and those of its parts give the answers.
        names: names that transformers knows, for ``attn`` and ``experts``.
    """
    internal = {f"_{kind}_implementation_internal": name for kind, name in names.items()}
    before = _inside.set(_Inside(frozenset(map(id, _configs(model.config))), internal))
    try:
        yield
    finally:
        _inside.reset(before)


def experts(model: PreTrainedModel) -> str | None:
    """How a pass computes experts: on a CPU one after the other, as linear layers, which have fixed bits."""
    own = getattr(model.config, "_experts_implementation", None)
    return "eager" if model.device.type == "cpu" else own


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration, and the configurations of the model's parts."""
    yield config
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            yield from _configs(part)
