"""Which attention a model uses, and how it computes its experts, inside a pass of Forerun in this thread.

transformers asks a model's configuration at every layer. All threads share the configuration, so it must not be written
to for the time of a pass: another thread's own ``model.generate`` would run with Forerun's attention then, and of two
passes at once the first to end would take it from the other. So a configuration answers for the thread that asks, and
nothing is written at all.
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
    """What the configurations of a model, known by their ids, answer in this thread."""

    configs: frozenset[int]
    names: Mapping[str, str | None]


_inside: ContextVar[_Inside | None] = ContextVar("inside", default=None)


class _Answer:
    """In the place of a configuration's attribute: the attribute itself, but for the thread that is inside."""

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
def switched(model: PreTrainedModel, **names: str | None) -> Iterator[None]:
    """Let the model use other implementations inside, in this thread.

    Args:
        model: whose configuration names them, one for each of its parts.
        names: of implementations that transformers knows, of ``attn`` and ``experts``.
    """
    internal = {f"_{kind}_implementation_internal": name for kind, name in names.items()}
    before = _inside.set(_Inside(frozenset(map(id, _configs(model.config))), internal))
    try:
        yield
    finally:
        _inside.reset(before)


def experts(model: PreTrainedModel) -> str | None:
    """How experts are computed in a pass: on a CPU one after the other, by the linear layer that all others are."""
    own = getattr(model.config, "_experts_implementation", None)
    return "eager" if model.device.type == "cpu" else own


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration, and those of a model's parts behind it."""
    yield config
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            yield from _configs(part)
