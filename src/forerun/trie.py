"""The trie of the Lookahead paper (section 4.3): what was generated, and what was asked, drafts what may come.

Each namespace has one shared index of the tokens generated in it. Each live request has a private index of the
branches that hold a token of its prompt; no other request reads it, and it is freed as a whole when the request ends
("branch eliminating"). Branches grow as tokens arrive: after every token, all of its last ``branch_length`` suffixes
count. The indexes are ``ngrams.Ngrams``; ``multibranch`` reads them. Not thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from forerun import multibranch, ngrams, trie_file
from forerun.multibranch import Draft
from forerun.ngrams import LIVE, REMOVED, Int32Array, Ngrams
from forerun.tree import IntArray
from forerun.trie_file import TrieFileError

__all__ = ["Draft", "Form", "Trie", "TrieConfig", "TrieFileError"]

Form = Literal["hierarchical", "parallel", "single"]
Tokens = Sequence[int] | IntArray

_NOTHING = Ngrams.allocate(1)


@dataclass(frozen=True)
class TrieConfig:
    """How branches are kept and drafted.

    Attributes:
        branch_length: tokens of a branch, context included (the paper's L_b).
        max_prefix: longest context matched; less than ``branch_length``.
        min_matches: a context that yields fewer nodes is joined by the next shorter one (the paper's N_m).
        capacity: most nodes in a namespace; when it is reached, counts decay and nodes below one give way.
        prompt_capacity: most nodes for a prompt; of a longer one the latest part is indexed.
        prompt_weight: what an occurrence in the prompt counts for, one in the outputs counting 1.
        decay: factor of the decay.
        form: the draft's: branches merged on shared prefixes, side by side, or the likeliest alone.
    """

    branch_length: int = 12
    max_prefix: int = 6
    min_matches: int = 64
    capacity: int = 1 << 20
    prompt_capacity: int = 1 << 21
    prompt_weight: float = 2.0
    decay: float = 0.5
    form: Form = "hierarchical"

    def __post_init__(self) -> None:
        _demand("branch_length", self.branch_length, 2 <= self.branch_length <= 256, "2 to 256")
        _demand("max_prefix", self.max_prefix, 1 <= self.max_prefix < self.branch_length, "1 to branch_length - 1")
        _demand("min_matches", self.min_matches, self.min_matches >= 1, "at least 1")
        for name in ("capacity", "prompt_capacity"):
            least, value = 4 * self.branch_length, getattr(self, name)
            _demand(name, value, least <= value < 1 << 31, f"4 * branch_length ({least}) to 2**31 - 1")
        _demand("prompt_weight", self.prompt_weight, 0 < self.prompt_weight <= 1e6, "above 0, to 1e6")
        _demand("decay", self.decay, 0 <= self.decay <= 0.9, "0 to 0.9")
        _demand("form", self.form, self.form in get_args(Form), f"one of {', '.join(get_args(Form))}")


def _demand(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass
class _Live:
    """A request: its private index, and where its suffixes stand in both indexes (see ``ngrams.start``)."""

    namespace: str
    private: Ngrams
    border: Int32Array
    cursors: Int32Array
    recent: IntArray
    removed: int = -1
    generated: int = 0


class Trie:
    """N-gram index over namespaces and live requests.

    Args:
        config: see ``TrieConfig``.
    """

    def __init__(self, config: TrieConfig | None = None) -> None:
        self.config = config or TrieConfig()
        self._decay = float(self.config.decay)  # numbers of one type, or the functions would be compiled twice
        self._shared: dict[str, Ngrams] = {}
        self._live: dict[int, _Live] = {}

    def begin(self, request_id: int, namespace: str, prompt: Tokens) -> None:
        """Start a request and index its prompt for it alone.

        Raises:
            ValueError: if the request is live already, or a token is not in [0, 2**31).
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id} has begun already")
        config = self.config
        tokens = _checked(prompt)[-(config.prompt_capacity // config.branch_length) :]
        most = (len(tokens) + config.branch_length) * config.branch_length
        private = Ngrams.allocate(min(most, config.prompt_capacity))
        border = ngrams.start(config.branch_length)
        ngrams.insert(private, border, tokens, self._decay)
        border[0] = ngrams.DEAD  # what starts behind the prompt is not private
        recent = np.zeros(config.branch_length - 1, np.int64)
        self._live[request_id] = _Live(namespace, private, border, ngrams.start(config.branch_length), recent)

    def extend(self, request_id: int, tokens: Tokens) -> None:
        """Count the generated ``tokens``; those that complete a branch with prompt tokens stay private.

        Raises:
            ValueError: if the request is not live, or a token is not in [0, 2**31); nothing is counted then.
        """
        config, live, new = self.config, self._of(request_id), _checked(tokens)
        if live.generated < config.branch_length - 1:
            ngrams.insert(live.private, live.border, new, self._decay)
        shared = self._namespace(live.namespace)
        ngrams.extend(shared, live.cursors, live.recent, live.generated, live.removed, new, self._decay)
        live.removed = int(shared.state[REMOVED])
        live.generated += len(new)

    def retrieve(self, request_id: int, context_tail: Tokens, budget: int, max_depth: int) -> Draft:
        """What may follow ``context_tail``, the last tokens of the request's text.

        Returns:
            Up to ``budget`` nodes, at most ``max_depth`` deep, parents first: tokens int64 ``[n]``, parents int64
            ``[n]`` and probability of acceptance float64 ``[n]``, estimated from weighted relative frequencies.

        Raises:
            ValueError: if the request is not live, or a token is not in [0, 2**31).
        """
        config, live = self.config, self._of(request_id)
        budget, single = max(budget, 0), config.form == "single"
        draft = Draft(np.empty(budget, np.int64), np.empty(budget, np.int64), np.empty(budget, np.float64))
        context = _checked(context_tail[-config.max_prefix :])
        if budget == 0 or max_depth < 1 or not len(context):
            return multibranch.cut(draft, 0)
        size = multibranch.retrieve(
            live.private,
            self._shared.get(live.namespace, _NOTHING),
            float(config.prompt_weight),
            context,
            draft,
            1 if single else budget,
            1 if single else config.min_matches,
            max_depth,
            config.branch_length,
        )
        if config.form == "parallel":
            return multibranch.unmerge(draft, size)
        return multibranch.cut(draft, size)

    def finish(self, request_id: int) -> None:
        """Forget the request and its prompt; what it generated stays in the namespace. Unknown ones are ignored."""
        self._live.pop(request_id, None)

    def warm(self, namespace: str, sequences: Iterable[Tokens]) -> None:
        """Count sequences as if they had been generated in ``namespace``.

        Raises:
            ValueError: if a token is not in [0, 2**31); the sequences before it are counted.
        """
        for sequence in sequences:
            tokens = _checked(sequence)
            cursors = ngrams.start(self.config.branch_length)
            ngrams.insert(self._namespace(namespace), cursors, tokens, self._decay)

    def nodes(self, namespace: str) -> int:
        """Nodes in use by the outputs of ``namespace``."""
        shared = self._shared.get(namespace)
        return 0 if shared is None else int(shared.state[LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all namespaces and live requests."""
        indexes = [*self._shared.values(), *(live.private for live in self._live.values())]
        return sum(index.nbytes for index in indexes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the namespaces to ``path``, in one atomic step; prompts are never written.

        Raises:
            OSError: if it cannot be written, as on a full disk; what ``path`` held before is still there.
        """
        trie_file.write(path, {name: ngrams.dump(index) for name, index in self._shared.items()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the namespaces by those of a file; nodes beyond the capacity or branch length are left out.

        Raises:
            TrieFileError: if the file is truncated, damaged, of another version or no trie; nothing changes then.
            OSError: if it cannot be read.
        """
        loaded = {}
        for name, rows in trie_file.read(path).items():
            loaded[name] = Ngrams.allocate(self.config.capacity)
            if not ngrams.restore(loaded[name], rows, self.config.branch_length):
                raise TrieFileError(f"{path} has no valid content: namespace {name!r} is not a trie")
        self._shared = loaded
        for live in self._live.values():
            live.removed = -1  # their cursors belong to what was replaced

    def _of(self, request_id: int) -> _Live:
        live = self._live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not live; begin it first")
        return live

    def _namespace(self, name: str) -> Ngrams:
        index = self._shared.get(name)
        if index is None:
            index = self._shared[name] = Ngrams.allocate(self.config.capacity)
        return index


def _checked(tokens: Tokens) -> IntArray:
    array = np.ascontiguousarray(tokens, dtype=np.int64)
    if not array.flags.carray:  # read-only memory is another type to the compiler
        array = array.copy()
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}; allowed: a vector")
    if not ngrams.valid(array):
        wrong = array[(array < 0) | (array >= 1 << 31)][0]
        raise ValueError(f"token id is {wrong}; allowed: 0 to 2**31 - 1")
    return array
