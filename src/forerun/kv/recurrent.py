"""States of recurrent layers, which replace keys and values.

A state cannot be truncated as keys can. So a row keeps a state, older states at fixed positions (snapshots), and the
inputs of recent tokens: kilobytes, where a state per tree node would need megabytes per layer. The next pass replays
the accepted path from its inputs, and ``truncate`` replays from a snapshot.

A token's state follows from its predecessor's, so its bits do not depend on where passes or snapshots cut the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import ROOT, IntArray
from forerun.kernels.recurrent.gated_states import GatedShape, TokenOrder, run_states
from forerun.kernels.recurrent.short_convolution import convolve
from forerun.kv.shared_prefix import Tensors

SNAPSHOT_TOKENS = 64
"""Snapshots are at multiples of this many tokens: the granularity of prefix sharing."""
MAX_SNAPSHOTS = 8
"""Maximum snapshots per row: some where messages start, the others at equal distances; of too many, every second is
dropped. The last two multiples of ``SNAPSHOT_TOKENS`` are kept besides, so that a row can always go back that far."""
FIRST_TURNS, LAST_TURNS = 2, 4
"""Snapshots where messages start: after the system prompt and tools, and in the last turns, where prompts change."""
KEPT_INPUTS = 3 * SNAPSHOT_TOKENS
"""Minimum inputs kept, in tokens: those after the last snapshot but one, and of an accepted path."""
MAX_INPUTS = 4 * KEPT_INPUTS
"""A larger buffer was made for a prompt, and is freed in the next short pass."""
CONVOLUTION_KIND, STATE_KIND = "convolution", "state"
RECURRENT_STATES = "recurrent"

Key = tuple[int, str]
"""A layer, and which of its recurrences."""


def check_type(held: torch.dtype, new: torch.dtype) -> None:
    """Raise ValueError for rows of another type than the cached ones, as after a cast of the model."""
    if held != new:
        raise ValueError(f"this cache holds {held} rows, but the model's are {new}; use a new cache")


@dataclass
class _Inputs:
    """Inputs of one recurrence, ``[capacity, width]``, from token ``first`` on; outputs need ``before`` earlier."""

    rows: torch.Tensor
    first: int
    before: int

    @classmethod
    def after(cls, rows: torch.Tensor, length: int) -> _Inputs:
        """Start from the ``before`` rows that precede position ``length``."""
        return cls(rows, length - len(rows), len(rows))

    def append(self, new: torch.Tensor, read: int, end: int) -> None:
        self.reserve(len(new), read, end, new).copy_(new)

    def reserve(self, count: int, read: int, end: int, like: torch.Tensor) -> torch.Tensor:
        """Make room for ``count`` rows from position ``end`` on; keep all rows after the ``read`` tokens."""
        check_type(self.rows.dtype, like.dtype)
        place = end - self.first
        if place + count > len(self.rows) or (len(self.rows) > MAX_INPUTS and count <= KEPT_INPUTS):
            kept = self.rows[max(0, min(place - KEPT_INPUTS, read - self.first) - self.before) : place]
            rows = like.new_empty(len(kept) + count + KEPT_INPUTS, like.shape[1])
            if len(kept):
                rows[: len(kept)] = kept
            self.rows, self.first = rows, end - len(kept)
        return self.part(end, end + count)

    def part(self, first: int, last: int) -> torch.Tensor:
        return self.rows[first - self.first : last - self.first]

    def window(self, position: int) -> torch.Tensor:
        return self.part(position - self.before, position).clone()


@dataclass
class _State:
    """One recurrence's state, memory for the next, and states saved by a pass, by position."""

    now: torch.Tensor | None = None
    spare: torch.Tensor | None = None
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    model_dtype: torch.dtype | None = None  # the model's type, which states do not show

    def memory(self, count: int, like: torch.Tensor, shape: GatedShape) -> torch.Tensor:
        if count == 1 and self.spare is not None:
            return self.spare[None]
        return like.new_empty(count, shape.heads, shape.dim, shape.out_dim)


@dataclass
class _BlockPlan:
    """How a pass goes over a block, in all layers.

    Attributes:
        saved: positions at which states are saved, ascending.
        parents: of the tokens, by the number of earlier tokens that a convolution sees.
    """

    block: Block
    saved: tuple[int, ...]
    order: TokenOrder | None = None
    parents: dict[int, torch.Tensor] = field(default_factory=dict)


class RecurrentStates:
    """States of all recurrent layers of one row after ``length`` committed tokens; a pass needs ``commit``."""

    def __init__(self) -> None:
        self.length = 0
        self._origin = 0  # where the states are zeros
        self._position = 0  # tokens in the states
        self.inputs: dict[Key, _Inputs] = {}
        """Empty until a pass has used it."""
        self._states: dict[int, _State] = {}
        self._snapshots: dict[int, dict[Key, torch.Tensor]] = {}
        self._spacing = SNAPSHOT_TOKENS
        self._turns: frozenset[int] = frozenset()  # where messages start, as multiples of SNAPSHOT_TOKENS
        self._owned = False  # whether nothing else refers to the states
        self._plan: _BlockPlan | None = None

    def keep_at(self, positions: Sequence[int]) -> None:
        """Keep snapshots at the first and last of these positions, in place of some at equal distances."""
        places = sorted({position // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS for position in positions} - {0})
        self._turns = frozenset((*places[:FIRST_TURNS], *places[-LAST_TURNS:]))

    def convolve(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, block: Block
    ) -> torch.Tensor:
        """Convolve the block's inputs ``[n, C]`` causally; see ``short_convolution.convolve``."""
        before, end = len(weights) - 1, self.length + len(block)
        plan, inputs = self._planned(block), self._convolved(layer, before, x)
        inputs.append(x, self._position, self.length)
        if before not in plan.parents:
            plan.parents[before] = torch.from_numpy(_parents(block, before)).to(x.device)
        return convolve(inputs.part(self.length - before, end), weights, bias, plan.parents[before], before)

    def history(self, layer: int, before: int, like: torch.Tensor, block: Block) -> int:
        """Return the address of ``before`` tokens' inputs, then room for the block's; ``like``: any, ``[m, C]``."""
        self._planned(block)
        inputs = self._convolved(layer, before, like)
        room = inputs.reserve(len(block), self._position, self.length, like)
        return room.data_ptr() - before * room.stride(0) * room.element_size()

    def _convolved(self, layer: int, before: int, like: torch.Tensor) -> _Inputs:
        key = layer, CONVOLUTION_KIND
        if key not in self.inputs:
            self.inputs[key] = _Inputs.after(like.new_zeros(before, like.shape[1]), self.length)
        return self.inputs[key]

    def advance(self, layer: int, shape: GatedShape, rows: torch.Tensor, q: torch.Tensor, block: Block) -> torch.Tensor:
        """Compute a recurrence over the block, ``[n, heads, out_dim]``; see ``gated_states.run_states``."""
        key, plan = (layer, STATE_KIND), self._planned(block)
        state = self._states.setdefault(layer, _State())
        state.model_dtype = state.model_dtype or q.dtype
        check_type(state.model_dtype, q.dtype)
        inputs = self.inputs.setdefault(key, _Inputs.after(rows[:0], self.length))
        inputs.append(rows, self._position, self.length)
        saved = state.memory(len(plan.saved), q, shape)
        read = inputs.part(self._position, self.length + len(block))
        if plan.order is None:
            tokens = {position - self._position - 1: i for i, position in enumerate(plan.saved)}
            plan.order = TokenOrder.of(_parents(block, self.length - self._position), tokens, rows.device)
        out = run_states(shape, read, q, state.now, saved, plan.order)
        each = [t.clone() for t in saved] if len(plan.saved) > 1 else [saved[0]]
        state.saved = dict(zip(plan.saved, each, strict=True))
        return out

    def commit(self, block: Block, path: Sequence[int]) -> None:
        plan, end = self._plan, self.length + len(block.pending)
        if plan is None or plan.block is not block:
            raise ValueError("the states can only keep tokens of the last pass")
        if list(path) != list(range(len(path))):
            nodes = torch.tensor(path) + end
            for inputs in self.inputs.values():
                inputs.part(end, end + len(path)).copy_(inputs.rows[nodes - inputs.first])
        for position in plan.saved:
            if position % SNAPSHOT_TOKENS == 0:
                self._snapshots[position] = self._windows(position) | {
                    (layer, STATE_KIND): state.saved[position] for layer, state in self._states.items()
                }
        for state in self._states.values():
            state.spare = state.now if self._owned else None
            state.now, state.saved = state.saved[end], {}
        self.length, self._position, self._plan = end + len(path), end, None
        self._owned = end not in self._snapshots
        self._thin_out()

    def truncate(self, length: int) -> int:
        """Drop tokens from ``length`` on and return the tokens left: ``length`` if at most ``SNAPSHOT_TOKENS`` were
        dropped, else ``length`` or the last snapshot before it."""
        self._plan, length = None, min(length, self.length)
        if length < self._position:
            snapshot = max((position for position in self._snapshots if position <= length), default=self._origin)
            if any(inputs.first > snapshot - inputs.before for inputs in self.inputs.values()):
                length = snapshot  # some inputs after it are gone
            if length == self._origin:
                self.blank(length)
                return length
            self._restore(snapshot, length)
        self.length = length
        self._snapshots = {position: each for position, each in self._snapshots.items() if position <= length}
        return length

    def blank(self, length: int) -> None:
        """Hold zeros for ``length`` committed tokens; for measurements."""
        self.clear()
        self.length = self._position = self._origin = length

    def fork(self) -> RecurrentStates:
        """Return states that continue independently in the same memory, which neither changes."""
        fork = RecurrentStates()
        fork.length, fork._position = self.length, self._position
        fork._origin, fork._spacing, fork._turns = self._origin, self._spacing, self._turns
        fork.inputs = {
            key: _Inputs(
                inputs.part(first := self._position - inputs.before, self.length).clone(), first, inputs.before
            )
            for key, inputs in self.inputs.items()
        }
        fork._states = {
            layer: _State(state.now, model_dtype=state.model_dtype) for layer, state in self._states.items()
        }
        if self._position > self._origin:
            now = {(layer, STATE_KIND): each.now for layer, each in self._states.items() if each.now is not None}
            fork._snapshots = {self._position: self._windows(self._position) | now}
        self._owned = False
        return fork

    def saved_state(self, length: int) -> Tensors:
        """Return the snapshots of the first ``length`` tokens; they must not be changed."""
        return {
            f"{position}.{layer}.{kind}": t
            for position, each in self._snapshots.items()
            if position <= length
            for (layer, kind), t in each.items()
        }

    def beginning(self, tensors: Tensors, length: int) -> RecurrentStates:
        """Return states up to the last snapshot in a prefix's first ``length`` tokens, from ``saved_state``."""
        states = RecurrentStates()
        states._turns = self._turns
        for name, t in tensors.items():
            position, layer, kind = name.split(".")
            if int(position) <= length:
                states._snapshots.setdefault(int(position), {})[int(layer), kind] = t
        if states._snapshots:
            states._restore(max(states._snapshots), max(states._snapshots))
            states._thin_out()
        return states

    @property
    def nbytes(self) -> int:
        """Bytes held, except those shared with others."""
        held = [inputs.rows for inputs in self.inputs.values()]
        held += [t for state in self._states.values() for t in (state.now, state.spare) if t is not None]
        held += [t for position, each in self._snapshots.items() if position != self._position for t in each.values()]
        return sum(t.nbytes for t in held)

    @property
    def max_bytes(self) -> int:
        """Upper bound of a row's bytes, for a model that has made a pass with it."""
        inputs = sum(each.rows[:1].nbytes for each in self.inputs.values()) * (MAX_INPUTS + KEPT_INPUTS)
        states = sum(next(iter(state.saved.values())).nbytes for state in self._states.values() if state.saved)
        return inputs + states * (MAX_SNAPSHOTS + 5)

    def _planned(self, block: Block) -> _BlockPlan:
        if self._plan is None or self._plan.block is not block:
            if block.start != self.length:
                raise ValueError(f"the block starts at {block.start}, but the states have {self.length} tokens")
            end = self.length + len(block.pending)
            multiples = range((self._position // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS, end + 1, SNAPSHOT_TOKENS)
            saved = {position for position in multiples if self._is_kept(position, end)} | {end}
            self._plan = _BlockPlan(block, tuple(sorted(saved)))
        return self._plan

    def _is_kept(self, position: int, end: int) -> bool:
        last = (end // SNAPSHOT_TOKENS - 1) * SNAPSHOT_TOKENS
        return position % self._spacing == 0 or position in self._turns or position >= last

    def _thin_out(self) -> None:
        most = MAX_SNAPSHOTS - len(self._turns)
        while sum(1 for each in self._snapshots if each % self._spacing == 0 and each not in self._turns) > most:
            self._spacing *= 2
        for position in [each for each in self._snapshots if not self._is_kept(each, self._position)]:
            del self._snapshots[position]

    def clear(self) -> None:
        self.length = self._position = self._origin = 0
        self._spacing, self._turns, self._owned, self._plan = SNAPSHOT_TOKENS, frozenset(), False, None
        self.inputs, self._states, self._snapshots = {}, {}, {}

    def _windows(self, position: int) -> dict[Key, torch.Tensor]:
        return {key: inputs.window(position) for key, inputs in self.inputs.items() if key[1] == CONVOLUTION_KIND}

    def _restore(self, position: int, length: int) -> None:
        """Return to a snapshot, or to zeros; inputs are replaced if none are replayed from there."""
        for state in self._states.values():
            state.now = state.spare = None
        for (layer, kind), t in self._snapshots.get(position, {}).items():
            if kind == STATE_KIND:
                before = self._states.get(layer)
                self._states[layer] = _State(t, model_dtype=None if before is None else before.model_dtype)
            if position == length:
                self.inputs[layer, kind] = _Inputs.after(t[:0, 0] if kind == STATE_KIND else t, length)
        self.length, self._position, self._owned = length, position, False


def _parents(block: Block, before: int) -> IntArray:
    """Return each token's parent in a chain of ``before`` tokens followed by the block; -1 for the first."""
    first = before + len(block.pending)
    tree = block.tree.parents
    return np.concatenate((np.arange(-1, first - 1), np.where(tree == ROOT, first - 1, tree + first)))
