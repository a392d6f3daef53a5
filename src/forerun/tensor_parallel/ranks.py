"""Scorers of a model in several processes: rank 0 leads like any scorer; others' engines run ``follow``."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from forerun.core.block import Block, RowScores
from forerun.kv.cache import Cache
from forerun.kv.streaming import Rotation
from forerun.models.forward import gate
from forerun.models.forward.scorer import PassResult, Scorer, group_of
from forerun.tensor_parallel.channel import Channel, LeaderError, ParallelError
from forerun.tensor_parallel.rank_mirror import Entry, MirroredCaches, RankMirror

ResultT = TypeVar("ResultT")
CacheT = TypeVar("CacheT", bound=Cache)
LEAD_BEGIN, LEAD_END = "begin", "end"
"""Entries around a period in which rank 0 leads; periods nest."""
LEADER_INTERRUPTED = "interrupted"
"""The reason in the last entry after Ctrl-C."""
SCORER_ATTRIBUTE = "_forerun_parallel"
"""Where a model keeps its scorer. All its engines share one, so all passes have one order."""


class Leader(Scorer):
    """Rank 0's scorer: it announces each pass, with the cache operations before it."""

    def __init__(self, model: PreTrainedModel, channel: Channel) -> None:
        super().__init__(model)
        self._channel = channel
        self._mirror = RankMirror()

    def adopt(self, cache: CacheT) -> CacheT:
        with self._channel.turn:
            self._mirror.adopt(cache)
        return cache

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        for cache in caches:
            self.adopt(cache)
        with self._announced("pass", blocks, caches):
            return super()._pass(blocks, caches, layers)

    def rotation(self) -> Rotation | None:
        with self._announced("rotation"):
            return super().rotation()

    def led(self, work: Callable[[], ResultT]) -> ResultT:
        with self.leading() as end:
            result = work()
            end.append(result)
        return result

    @contextmanager
    def leading(self) -> Iterator[Entry]:
        """Let the other ranks follow within this context. At its end, they receive the yielded list's entries."""
        with self._channel.turn:
            self.tell(LEAD_BEGIN)
            self._channel.open(self._mirror.message())
        last: Entry = []
        failed: str | None = None
        try:
            yield last
        except KeyboardInterrupt:
            failed = LEADER_INTERRUPTED
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._channel.turn:
                try:
                    self.tell(LEAD_END, failed, last)
                except TypeError as error:  # the list is not JSON, and the others must not wait for it
                    self.tell(LEAD_END, f"{type(error).__name__}: {error}", [])
                    raise
                finally:
                    self._channel.close(self._mirror.message())

    def tell(self, *entry: Any) -> None:
        """Send an entry to the followers with the next message."""
        self._mirror.note(*entry)

    @contextmanager
    def _announced(self, *entry: Any) -> Iterator[None]:
        with self._channel.turn:
            self._mirror.note(*entry)
            with self._channel.speaking(self._mirror.message):
                yield


class Follower(Scorer):
    """Another rank's scorer, which runs the passes that rank 0 announces, and starts none."""

    def __init__(self, model: PreTrainedModel, channel: Channel) -> None:
        super().__init__(model)
        self._channel = channel
        self._caches = MirroredCaches()
        self._entries: deque[Entry] = deque()
        self._rotation: Rotation | None = None

    def score_rows(
        self, blocks: Sequence[Block], caches: Sequence[Cache], states_of: Sequence[int] = ()
    ) -> list[RowScores]:
        """Raise a ParallelError: only rank 0 starts passes."""
        raise ParallelError(f"rank {self._channel.rank} starts no passes; it follows rank 0")

    def led(self, work: Callable[[], ResultT]) -> ResultT:
        last: Entry = []
        for _ in self.follow(last):
            pass
        return cast(ResultT, last[0])

    def follow(self, last: Entry) -> Iterator[Entry]:
        """Repeat rank 0's operations while it leads, and yield its other entries; ``last`` receives those at the end.
        Raise KeyboardInterrupt if rank 0 was interrupted, LeaderError if it failed, ParallelError if it is gone."""
        depth = 0
        while True:
            if not self._entries:
                self._entries.extend(json.loads(self._channel.receive(not depth)))
                continue
            name, *parts = self._entries.popleft()
            if name in (LEAD_BEGIN, LEAD_END):
                depth += 1 if name == LEAD_BEGIN else -1
                if not depth:
                    failed, entries = parts
                    last += entries
                    if failed == LEADER_INTERRUPTED:
                        raise KeyboardInterrupt
                    if failed is not None:
                        raise LeaderError(f"rank 0 failed: {failed}")
                    return
            elif not self._do(name, parts):
                yield [name, *parts]

    @torch.inference_mode()
    def _do(self, name: str, parts: list[Any]) -> bool:
        """Execute an entry; return False if the caller must handle it."""
        match name:
            case "pass":
                blocks, caches = ([self._caches.value(each) for each in part] for part in parts)
                with self._channel.together():
                    super().score_rows(blocks, caches)
            case "rotation":
                with self._channel.together():
                    self._rotation = self.rotation()
            case "make":
                number, kind, made_of = parts
                self._caches.make(number, kind, made_of, self._rotation)
            case "do":
                self._caches.do(*parts)
            case "drop":
                self._caches.drop(*parts)
            case _:
                return False
        return True


def admit(model: PreTrainedModel, **single_process: object) -> Scorer:
    """Return this rank's scorer of a model that all ranks have loaded alike.

    Raises ValueError for a setting other than None in ``single_process``, as these need a model in one process; and
    UnsupportedModelError as ``gate.admit``, or if the processes do more than tensor parallelism.
    """
    for name, value in single_process.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}; a model in {model.tp_size} processes does not support it")
    if dist.get_world_size() != model.tp_size:
        raise gate.UnsupportedModelError(
            f"{type(model).__name__} is not supported: it is in {model.tp_size} of {dist.get_world_size()} processes; "
            "tensor parallelism must use all of them"
        )
    known: dict[str, Scorer] = model.__dict__
    if SCORER_ATTRIBUTE not in known:
        gate.admit(model)
        channel = Channel(group_of(model), model.device)
        known[SCORER_ATTRIBUTE] = Follower(model, channel) if channel.rank else Leader(model, channel)
    return known[SCORER_ATTRIBUTE]
