"""A transformers decoder as a scorer: one forward pass returns logits at every node of every row's tree.

Rows are packed into one sequence, each with its positions, so ragged rows need no padding. Attention is the only
operation that mixes tokens; Forerun's, registered once with transformers, finds its thread's running pass and keeps
rows apart. Outside of a pass, and in other threads, a model keeps its attention.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from forerun.core.block import Block, RowScores
from forerun.core.fairness import FairLock
from forerun.core.pinned import to_device
from forerun.core.transfers import present
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec, Packings, attend_in_order
from forerun.kernels.attention.packed_pass import wanted_tokens
from forerun.kernels.linear import ordered_modules
from forerun.kv.cache import Cache, KVShape
from forerun.kv.full_cache import FullCache
from forerun.kv.streaming import Rotation
from forerun.models.forward.inputs import learned_positions
from forerun.models.forward.weight_watch import Change, WeightWatch

Result = TypeVar("Result")
AnyCache = TypeVar("AnyCache", bound=Cache)

ATTENTION_NAME = "forerun"
"""Forerun's entry in transformers' attention interface."""


class AttentionPass(Protocol):
    """What the attention function needs of a forward pass."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Compute each row's attention over its cache; ``[1, H, n, d]`` in and out."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over any caches: its rows, in the order of the packed sequence."""

    blocks: Sequence[Block]
    caches: Sequence[Cache]
    kv_dtype: torch.dtype | None = None
    packings: Packings = field(default_factory=dict)
    unnumbered: Iterator[int] = field(default_factory=lambda: count(-1, -1))
    """Numbers for layers that share one module, which says -1, in the order of their calls."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        layer = next(self.unnumbered) if layer < 0 else layer
        sizes = [len(block) for block in self.blocks]
        with ordered_modules.unwatched():
            if self.kv_dtype is not None:
                k, v = k.to(self.kv_dtype), v.to(self.kv_dtype)
            split = (torch.split(t, sizes, 2) for t in (q, k, v))
            rows = list(zip(self.caches, *split, self.blocks, strict=True))
            stored = [cache.store(layer, *qkv, block, spec) for cache, *qkv, block in rows]
        known = [each for each in stored if each is not None]
        if len(known) == len(stored):
            return attend_in_order(q, known, self.blocks, spec, self.packings)
        return torch.cat([cache.attend(layer, *qkv, block, spec) for cache, *qkv, block in rows], 2)


running: ContextVar[AttentionPass | None] = ContextVar("running", default=None)
"""This thread's pass. Not a keyword argument, as some models pass none to their attention."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as registered with transformers: ``[1, H, n, d]`` in, ``[1, n, H, d]`` out."""
    rows = running_pass()
    if attention_mask is not None:
        raise RuntimeError("this model's attention builds its mask itself, which is not supported")
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer: Any = module.layer_idx
    return rows.attend(layer, query, key, value, spec).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, attention)


# At every layer, transformers looks up the implementations of attention and experts in the model's configuration, which
# all threads share. A pass that changed it would switch another thread's ``model.generate`` to Forerun's attention, and
# the first of two concurrent passes to end would switch it off for the other. So the configuration stays, and while
# passes run, its class answers per thread; otherwise it is transformers' own, which ``torch.compile`` can trace.


@dataclass(frozen=True)
class _Inside:
    configs: frozenset[int]
    names: Mapping[str, str | None]


_inside: ContextVar[_Inside | None] = ContextVar("inside", default=None)


class _Answer:
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


_ANSWERED = ("_attn_implementation_internal", "_experts_implementation_internal")


class _Answers:
    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for name in _ANSWERED:
                    setattr(PreTrainedConfig, name, _Answer(name))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for name in _ANSWERED:
                    delattr(PreTrainedConfig, name)


_answers = _Answers()


@contextmanager
def use_implementations(model: PreTrainedModel, **names: str | None) -> Iterator[None]:
    """Use other implementations of ``attn`` and ``experts``, by transformers' names, in this context and thread."""
    internal = {f"_{kind}_implementation_internal": name for kind, name in names.items()}
    before = _inside.set(_Inside(frozenset(map(id, _configs(model.config))), internal))
    try:
        with _answers:
            yield
    finally:
        _inside.reset(before)


STATELESS_LAYERS = frozenset({"attention", "full_attention", "sliding_attention", "moe", "mlp"})
"""Types of layers that keep keys and values, or nothing."""


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return whether some layers keep a state instead of keys and values."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return bool(set(kinds) - STATELESS_LAYERS) if kinds else bool(model._is_stateful)


def experts(model: PreTrainedModel) -> str | None:
    """Return how a pass computes experts: on a CPU one by one, as linear layers, whose bits are fixed."""
    own = getattr(model.config, "_experts_implementation", None)
    return "eager" if model.device.type == "cpu" else own


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            yield from _configs(part)


class PassResult(NamedTuple):
    """Logits of wanted tokens ``[m, V]``; states of all tokens, if requested; best tokens ``[m]``, if computed."""

    logits: torch.Tensor
    states: torch.Tensor | None
    best: torch.Tensor | None = None

    def by_row(self, blocks: Sequence[Block]) -> list[RowScores]:
        """Return each row's part, given the pass's blocks."""
        if len(blocks) == 1:
            return [RowScores(*self)]
        wanted, counts = [len(block.tree) + 1 for block in blocks], [len(block) for block in blocks]
        parts = zip(self, (wanted, counts, wanted), strict=True)
        split = [[None] * len(blocks) if part is None else torch.split(part, sizes) for part, sizes in parts]
        return list(map(RowScores, *split))


class Scorer:
    """A model that ``gate`` admits, scoring blocks of tokens over caches that come with each call."""

    by_tables = False
    """Whether passes use tables of addresses on the device. Then they accept token ids that the CPU does not have
        yet (see ``Block``), and rows that are partly offloaded sum in the same order as others."""
    clock = staticmethod(time.perf_counter)
    """Returns seconds, without those of one-time work in passes."""

    def __init__(self, model: PreTrainedModel, kv_dtype: torch.dtype | None = None) -> None:
        self.model, self.kv_dtype = model, kv_dtype
        self._lock = FairLock()
        self._watch: WeightWatch | None = None
        self._version = 0
        self._inputs: Any = model.get_input_embeddings()
        self.limit = learned_positions(model)
        """Number of learned positions, None for no limit."""
        self.recurrent = is_recurrent(model)
        self._keeps_logits = model._supports_logits_to_keep()
        self.prompt_chunk: int | None = None
        """Tokens per prompt chunk (except the last), whose pass sums in a faster order; None if one order is used."""
        self.queries_from: int | None = None
        """Length up to which full caches keep no queries; None if they never do."""

    def refresh(self) -> int:
        """Check whether the model has changed; return a number that changes with what passes compute.

        Call it when a request begins, and before keys and values are shared or stored: passes do not check for changes.
        """
        with self._lock:
            if self._watch is None:
                self._watch = WeightWatch(self.model)
            elif (change := self._watch.look()) is not None:
                self._version += 1
                if change is Change.MODEL:
                    self._read_model()
            return self._version

    def renew(self) -> None:
        """Reread the model, changed or not; ``refresh`` then returns another number."""
        with self._lock:
            self._version += 1
            self._read_model()

    def _read_model(self) -> None:
        self._inputs = self.model.get_input_embeddings()
        self._watch = WeightWatch(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can embed, over all of a sharded model's parts."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def keep_queries(self, beyond: int) -> None:
        """Let full caches keep queries from now on, for sparse caches that select by them beyond ``beyond`` tokens.
        Keeping all queries of a prompt, rather than up to ``SAMPLED_QUERIES`` per chunk, added 5 % to prefill. A
        sequence with room to grow longer keeps them from its start: those of a few generated tokens are too few to
        select by."""
        self.queries_from = beyond if self.queries_from is None else min(beyond, self.queries_from)

    def keeps_queries(self, block: Block, cache: Cache) -> bool:
        """Return whether a cache keeps the queries of a pass over this block."""
        full = cache.full
        if self.queries_from is None or full is None:
            return False
        longest = max(full.capacity, full.length + len(block))
        return longest >= self.queries_from and full.wants_queries(block)

    @cached_property
    def kv(self) -> KVShape:
        """Shapes of a token's keys and values, found by a pass over one token."""
        cache = FullCache()
        with torch.inference_mode():
            self.score([Block(np.zeros(1, np.int64), DraftTree.empty(), 0)], [cache])
        return cache.shape

    @property
    def windowed(self) -> bool:
        """Whether some layers may have a sliding window, by the model's configuration."""
        return bool(getattr(self.model.config.get_text_config(decoder=True), "sliding_window", None))

    def reads_whole(self, cache: Cache) -> bool:
        """Return whether a prompt is prefilled in one pass, so that offloaded layers are written once."""
        return False

    def warm_up(self, states_of: tuple[int, ...] = ()) -> None:
        """Prepare what passes need once; ``states_of``: layers whose states passes return."""

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self._inputs.weight.device  # type: ignore[no-any-return]

    def adopt(self, cache: AnyCache) -> AnyCache:
        if cache.full is not None:
            cache.full.stateful = self.recurrent
        return cache

    def rotation(self) -> Rotation | None:
        """Find how the model's keys rotate with position; see ``find_rotation``."""
        from forerun.models.forward.rotary_probe import find_rotation  # imported only where keys are moved

        return find_rotation(Scorer(self.model))

    def led(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, which makes passes, on the leading process; the others return its result (plain values)."""
        return work()

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """Return only the logits of ``score_rows``."""
        return [row.logits for row in self.score_rows(blocks, caches)]

    def score_rows(
        self, blocks: Sequence[Block], caches: Sequence[Cache], states_of: Sequence[int] = ()
    ) -> list[RowScores]:
        """Run one forward pass over all rows. Each row's cache holds its block as a speculative tail until ``commit``.

        ``states_of``: layers whose hidden states are returned, as indices of transformers' ``hidden_states``: 0 for the
        embeddings, i for the output of layer i; the last one is after the final norm.
        """
        return self._pass(blocks, caches, tuple(states_of)).by_row(blocks)

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        ids = torch.from_numpy(np.concatenate([block.tokens for block in blocks]))
        positions = np.concatenate(
            [cache.position + block.offsets for block, cache in zip(blocks, caches, strict=True)]
        )
        places = to_device(torch.from_numpy(positions), self.device)
        return self._forward(
            to_device(ids, self.device), places, Pass(blocks, caches, self.kv_dtype), self._wanted(blocks), layers
        )

    def _wanted(self, blocks: Sequence[Block]) -> int | torch.Tensor:
        """Return the tokens that need logits: 0 for all, or their indices in the packed sequence."""
        if all(len(block.pending) == 1 for block in blocks):
            return 0
        return to_device(torch.from_numpy(wanted_tokens(blocks)), self.device)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: AttentionPass,
        wanted: int | torch.Tensor,
        layers: tuple[int, ...] = (),
    ) -> PassResult:
        """Compute logits ``[m, V]`` of ids ``[n]``, of all if ``wanted`` is 0; and states of all ids at ``layers``."""
        arguments: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_logits else {}
        if layers:
            arguments["output_hidden_states"] = list(layers)
        with (
            use_implementations(self.model, attn=ATTENTION_NAME, experts=experts(self.model)),
            attending(rows),
            ordered_modules.Ordered(),
            present(self.device),
        ):
            found = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments)
        logits = gather_logits(self.model, found.logits)[0]
        states = torch.cat([found.hidden_states[layer][0] for layer in layers], -1) if layers else None
        if not self._keeps_logits and isinstance(wanted, torch.Tensor):
            logits = logits[wanted.to(logits.device)]
        return PassResult(logits, states)


SelfTest = Callable[[Scorer, Callable[[], str | None]], str | None]
"""Tests a scorer. Returns why its logits differ from the model's, or None. It may remember a test that passed."""


def tested(scorer: Scorer, test: Callable[[], str | None]) -> str | None:
    """Run the test, and remember nothing."""
    return test()


def running_pass() -> AttentionPass:
    """Return this thread's running pass; raise ``RuntimeError`` if there is none."""
    rows = running.get()
    if rows is None:
        raise RuntimeError("the 'forerun' attention works only inside a Forerun pass")
    return rows


@contextmanager
def attending(rows: AttentionPass) -> Iterator[None]:
    """Send this thread's attention to a pass in this context."""
    before = running.set(rows)
    try:
        yield
    finally:
        running.reset(before)


# models that transformers has cut into parts, one per process (``DistributedConfig(tp_size=...)``)


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether this process holds only a part of each layer."""
    return (model.tp_size or 1) > 1


def group_of(model: PreTrainedModel) -> dist.ProcessGroup:
    """Return the processes that hold a sharded model's parts."""
    group: dist.ProcessGroup = model._mesh_manager.get_mesh("tp").get_group()
    return group


def gather_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Gather logits ``[..., V]`` over the full vocabulary, if each process has only its tokens'."""
    if isinstance(logits, DTensor):
        return logits.full_tensor()
    size = getattr(model.get_output_embeddings(), "out_features", logits.shape[-1])
    if not is_sharded(model) or logits.shape[-1] == size:
        return logits
    parts = -(-size // model.tp_size)  # the last process may have fewer
    mine = torch.nn.functional.pad(logits, (0, parts - logits.shape[-1])).contiguous()
    found = [torch.empty_like(mine) for _ in range(model.tp_size)]
    dist.all_gather(found, mine, group=group_of(model))
    return torch.cat(found, -1)[..., :size]
