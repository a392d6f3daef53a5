"""The scorers of a model in several processes: rank 0's leads, those of the other ranks follow.

Who uses the leader's need not know: a pass is a pass. What the followers' engines do is to run through ``follow``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.kv.cache import Cache
from forerun.kv.rerotation import Rotation
from forerun.models.forward import gate
from forerun.models.forward.scorer import Scorer, SelfTest
from forerun.models.forward.sharded import group_of, is_sharded
from forerun.tensor_parallel.channel import Channel, LeaderError, ParallelError
from forerun.tensor_parallel.rank_mirror import Entry, MirroredCache, RankMirror

T = TypeVar("T")
C = TypeVar("C", bound=Cache)
BEGIN, END = "begin", "end"
"""Entries around a time in which rank 0 leads; such times may lie within each other."""
INTERRUPTED = "interrupted"
"""What the last of them says after Ctrl-C."""
NAME = "_forerun_parallel"
"""Where a model keeps its scorer: all its engines have one, so that all passes are told in one order."""


class Leader(Scorer):
    """Rank 0's scorer: each pass is announced to the other ranks, with what was done to caches before it."""

    def __init__(self, model: PreTrainedModel, channel: Channel) -> None:
        super().__init__(model)
        self._channel = channel
        self._mirror = RankMirror()

    def adopt(self, cache: C) -> C:
        """See ``Scorer.adopt``."""
        with self._channel.turn:
            self._mirror.adopt(cache)
        return cache

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """See ``Scorer.score``."""
        for cache in caches:
            self.adopt(cache)
        with self._announced("pass", blocks, caches):
            return super().score(blocks, caches)

    def rotation(self) -> Rotation | None:
        """See ``Scorer.rotation``: every rank finds the same, by its own heads."""
        with self._announced("rotation"):
            return super().rotation()

    def led(self, work: Callable[[], T]) -> T:
        """See ``Scorer.led``."""
        found: Any = None
        with self.leading() as end:
            found = work()
            end.append(found)
        return cast(T, found)

    @contextmanager
    def leading(self) -> Iterator[Entry]:
        """A time in which the other ranks follow; what is put into the list reaches them when it ends."""
        with self._channel.turn:
            self.tell(BEGIN)
            self._channel.open(self._mirror.message())
        told: Entry = []
        failed: str | None = None
        try:
            yield told
        except KeyboardInterrupt:
            failed = INTERRUPTED
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._channel.turn:
                try:
                    self.tell(END, failed, told)
                except TypeError as error:  # the others may not wait for ever for what no message can hold
                    self.tell(END, f"{type(error).__name__}: {error}", [])
                    raise
                finally:
                    self._channel.close(self._mirror.message())

    def tell(self, *entry: Any) -> None:
        """Let the followers know, with the next message."""
        self._mirror.note(*entry)

    @contextmanager
    def _announced(self, *entry: Any) -> Iterator[None]:
        with self._channel.turn:
            self._mirror.note(*entry)
            with self._channel.speaking(self._mirror.message):
                yield


class Follower(Scorer):
    """Another rank's scorer: it takes part in the passes that rank 0 announces, and makes none of its own."""

    follows = True

    def __init__(self, model: PreTrainedModel, channel: Channel) -> None:
        super().__init__(model)
        self._channel = channel
        self._replica = MirroredCache()
        self._entries: deque[Entry] = deque()
        self._rotation: Rotation | None = None

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """Nothing that a follower does by itself.

        Raises:
            ParallelError: always.
        """
        raise ParallelError(f"rank {self._channel.rank} makes no passes of its own; it follows rank 0")

    def led(self, work: Callable[[], T]) -> T:
        """See ``Scorer.led``."""
        told: Entry = []
        for _ in self.follow(told):
            pass
        return cast(T, told[0])

    def follow(self, told: Entry) -> Iterator[Entry]:
        """Do what rank 0 does for as long as it leads, yielding what else it tells.

        Args:
            told: takes what rank 0 says at the end.

        Raises:
            KeyboardInterrupt: if rank 0 was interrupted.
            LeaderError: if rank 0 failed.
            ParallelError: if it is gone.
        """
        depth = 0
        while True:
            if not self._entries:
                self._entries.extend(self._replica.read(self._channel.receive(not depth)))
                continue
            name, *parts = self._entries.popleft()
            if name in (BEGIN, END):
                depth += 1 if name == BEGIN else -1
                if not depth:
                    failed, said = parts
                    told += said
                    _check(failed)
                    return
            elif not self._do(name, parts):
                yield [name, *parts]

    @torch.inference_mode()
    def _do(self, name: str, parts: list[Any]) -> bool:
        """Whether this was one of the things that are done here."""
        match name:
            case "pass":
                blocks, caches = ([self._replica.value(each) for each in part] for part in parts)
                with self._channel.together():
                    super().score(blocks, caches)
            case "rotation":
                with self._channel.together():
                    self._rotation = self.rotation()
            case "make":
                number, kind, made_of = parts
                self._replica.make(number, kind, made_of, self._rotation)
            case "do":
                self._replica.do(*parts)
            case "drop":
                self._replica.drop(*parts)
            case _:
                return False
        return True


def admit(model: PreTrainedModel, self_test: SelfTest, **whole: object) -> Scorer:
    """The fastest scorer whose logits are the model's own; for a model in several processes, this rank's part of it.

    Args:
        model: loaded on all ranks in the same way.
        self_test: see ``gate.admit``; for a model in one process.
        whole: settings, by name, that only a model in one process takes.

    Raises:
        UnsupportedModelError: as ``gate.admit``, or if the model's processes do more than tensor parallelism.
        ValueError: for a setting that it does not take.
    """
    if not is_sharded(model):
        return gate.admit(model, self_test)
    for name, value in whole.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}; a model in {model.tp_size} processes does without")
    if dist.get_world_size() != model.tp_size:
        raise gate.UnsupportedModelError(
            f"{type(model).__name__} is not supported: it is in {model.tp_size} of {dist.get_world_size()} processes; "
            "tensor parallelism has to take all of them"
        )
    known: dict[str, Scorer] = model.__dict__
    if NAME not in known:
        gate.admit(model)
        channel = Channel(group_of(model), model.device)
        known[NAME] = Follower(model, channel) if channel.rank else Leader(model, channel)
    return known[NAME]


def _check(failed: str | None) -> None:
    """Fail as rank 0 did."""
    if failed == INTERRUPTED:
        raise KeyboardInterrupt
    if failed is not None:
        raise LeaderError(f"rank 0 failed: {failed}")
