"""The trie drafter's index of prompts and earlier outputs; ``docs/trie.md`` derives it from one example.

Each namespace has one shared index of its outputs; when it is full, the oldest are removed. Each live request has a
private index of its prompt and output, freed when the request ends ("branch eliminating", Lookahead paper, section
4.3). Each namespace trains its own mixer, so drafts reveal nothing about other namespaces. Threads take turns, since
compiled code receives addresses of arrays that another thread might replace.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.core.array_handles import ArrayHandles
from forerun.core.fairness import locked
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie import entry_points, text_cursor
from forerun.trie.arrays import Index
from forerun.trie.draft_workspace import Draft, DraftWorkspace
from forerun.trie.logistic_mixer import Mixer
from forerun.trie.recycled import NOTHING_TO_KEEP, RecycledRows, RowsToKeep, joined
from forerun.trie.spelling import spellings
from forerun.trie.tables import CHUNK_TOKENS, TEXT_STEP
from forerun.trie.text_cursor import TextCursor
from forerun.trie.trie_file import TrieFileError
from forerun.trie.trie_store import Tokens, TrieConfig, TrieStore, checked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Draft", "TextUpdate", "Trie", "TrieConfig", "TrieFileError"]


log = logging.getLogger(__name__)

PROMPT_PIECE_TOKENS = 4096
"""Maximum prompt tokens indexed per call, some 10 ms: the longest wait of other threads."""


class SamplingNoise(NamedTuple):
    """Gumbel noise that a request samples with; see ``sampling.mixed``."""

    mixed_seed: int
    temperature: float


NO_NOISE = SamplingNoise(0, 0.0)
"""For greedy requests, and those whose noise is hidden from drafts."""

NO_TOKENS = np.empty(0, np.int64)


class TextUpdate(NamedTuple):
    """A request's part of a step, and the draft it wants next.

    Attributes:
        lists: top tokens of rows of logits.
        pending: tentative tokens after ``new``, not indexed.
        budget, max_depth, least: of the draft; see ``Trie.retrieve``.
        untaught: how many of the last new tokens do not train the mixer.
    """

    request_id: int
    new: Tokens = ()
    lists: RowsToKeep = NOTHING_TO_KEEP
    pending: Tokens = ()
    budget: int = 0
    max_depth: int = 0
    untaught: int = 0
    least: float = 0.0


@dataclass
class _Live:
    """A live request.

    Attributes:
        length: tokens of its sequence, including those not indexed yet.
        room: tokens that fit its index.
        unindexed: the rest of prediction and prompt, each with its cursor.
        predicted: whether its index starts with a predicted output.
        noise: that it samples with, if drafts may use it.
        cut: whether a warning said that the rest of its output is not indexed.
    """

    namespace: str
    own: Index
    cursor: TextCursor
    length: int
    room: int
    unindexed: deque[tuple[TextCursor, IntArray]]
    predicted: bool
    noise: SamplingNoise | None
    cut: bool = False
    handles: tuple[ArrayHandles[Index], ArrayHandles[TextCursor]] = field(
        default_factory=lambda: (ArrayHandles(), ArrayHandles())
    )

    def index_pending(self, tokens: int) -> None:
        while self.unindexed and tokens > 0:
            cursor, text = self.unindexed.popleft()
            piece, rest = text[:tokens], text[tokens:]
            text_cursor.ingest(self.own, cursor, piece, len(rest))
            tokens -= len(piece)
            if len(rest):
                self.unindexed.appendleft((cursor, rest))
            elif cursor is self.cursor and self.predicted:
                cursor.expect_copy(CHUNK_TOKENS)  # the position of the index's first token


class Trie(TrieStore):
    """An index over namespaces and live requests.

    Methods raise ValueError for a request that is not live, or a token that is not in [0, 2**31), and change nothing.
    """

    def __init__(self, config: TrieConfig | None = None, mixer: Mixer | None = None) -> None:
        super().__init__(config or TrieConfig(), mixer)
        self._live: dict[int, _Live] = {}
        self._workspace = DraftWorkspace.allocate(64)
        self._scratch = TextCursor.start()
        self._handles: tuple[ArrayHandles[DraftWorkspace], ArrayHandles[TextCursor]] = (ArrayHandles(), ArrayHandles())
        blank = Index.allocate(0, 0, 0)
        self._spelling, self._static = blank.spelling, blank.static

    def warm_up(self) -> None:
        """Compile or load everything that drafting runs, so that no request waits for it."""
        trie = Trie(self.config)
        trie.begin(0, "", [1, 2, 1])
        trie.extend(0, [2, 1, 2])
        trie.known_suffixes([(0, np.array([1, 2, 1, 2, 1, 2]))])
        trie.retrieve(0, 4, 4, [1])
        trie.finish(0)
        trie.warm("", [[1, 2, 3]])
        trie.snapshot("")
        trie.withdraw("")

    @locked
    def spell(self, tokenizer: Tokenizer) -> None:
        """Let matches follow words spelled without their space, in later requests."""
        self._spelling = spellings(tokenizer)

    def set_static_lists(self, rows: RecycledRows) -> None:
        """Draft from lists that the model computed without context, in later requests, where request and namespace have
        none. They contain no user data, so all namespaces share them. On collisions, the first rows win."""
        maker, last_first = Trie(self.config), np.arange(len(rows.last))[::-1]
        maker.begin(0, "", [0])
        before, last, tokens, scores = rows
        maker.recycle(0, RecycledRows(before[last_first], last[last_first], tokens[last_first], scores[last_first]))
        with self.lock:
            self._static = maker._live[0].own.recycled

    @locked
    def begin(
        self,
        request_id: int,
        namespace: str,
        prompt: Tokens,
        expected: int = 1024,
        prediction: Tokens = (),
        noise: SamplingNoise | None = None,
    ) -> None:
        """Start a request and index the first piece of its prompt; ``catch_up`` indexes the rest.

        Args:
            request_id: any number; ValueError if it is already live.
            namespace: whose outputs it drafts from and joins.
            expected: tokens that may be generated, to allocate room for.
            prediction: expected output, indexed like the prompt; the output is assumed to copy it until it diverges.
            noise: that it samples with, if drafts may use it.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id} is already live")
        tokens = checked(prompt)
        kept = tokens[-self.config.prompt_capacity :]
        predicted = checked(prediction)[: self.config.prompt_capacity]
        read = len(predicted) + len(kept)
        room = max(1, read + min(expected, 4096))
        space = self._shared.open(namespace)
        space.make_room(0)
        own = Index.for_tokens(room)._replace(spelling=self._spelling, static=self._static).with_hints(read)
        cursor = TextCursor.start()
        unindexed = deque(each for each in ((TextCursor.start(), predicted), (cursor, kept)) if len(each[1]))
        live = _Live(namespace, own, cursor, len(tokens), room, unindexed, len(predicted) > 0, noise)
        live.index_pending(PROMPT_PIECE_TOKENS)
        self._live[request_id] = live
        space.writers[request_id] = live.cursor

    @locked
    def catch_up(self, request_id: int, tokens: int) -> bool:
        """Index about ``tokens`` more prompt tokens, up to ``PROMPT_PIECE_TOKENS``; return whether all are indexed."""
        live = self._of(request_id)
        live.index_pending(max(1, min(tokens, PROMPT_PIECE_TOKENS)))
        return not live.unindexed

    def _read_prompt(self, request_id: int) -> None:
        """Index the rest of the prompt; other threads may take turns between pieces."""
        while self._of(request_id).unindexed:
            self.catch_up(request_id, PROMPT_PIECE_TOKENS)

    def step(self, updates: Sequence[TextUpdate]) -> list[Draft]:
        """Index new tokens of several requests, then draft for each, in one compiled call; see ``retrieve``."""
        for update in updates:
            self._read_prompt(update.request_id)
        parts = [part for update in updates for part in (update.new, update.pending) if len(part)]
        tokens = NO_TOKENS if not parts else checked(parts[0] if len(parts) == 1 else np.concatenate(parts))
        lists = joined([update.lists for update in updates if len(update.lists.at)])
        draft = Draft.allocate(sum(max(update.budget, 0) for update in updates))
        with self.lock:
            nodes = self._step(updates, tokens, lists, draft)
        return [draft.cut(end, end - count) for count, end in zip(nodes, accumulate(nodes), strict=True)]

    def _step(self, updates: Sequence[TextUpdate], tokens: IntArray, lists: RowsToKeep, draft: Draft) -> list[int]:
        """Repeat the compiled call, making room in between; return the nodes of each draft."""
        lives = [self._of(update.request_id) for update in updates]
        if not self._workspace.holds(most := max((update.budget for update in updates), default=0)):
            self._workspace = DraftWorkspace.allocate(most)
        steps = self._table(lives, updates)
        workspace, scratch = self._handles
        memory = workspace.at(self._workspace), scratch.at(self._scratch)
        given = steps, tokens, lists.at, *lists.rows, *memory, float(self.config.learning_rate), *draft
        while True:
            number, needs = entry_points.step(*given)
            if not needs:
                break
            self._supply(lives[number], needs, steps[number])
            for live, text in zip(lives, steps, strict=True):
                text.own, text.shared, text.cursor, text.mixer = self._addresses(live)
        for live, update in zip(lives, updates, strict=True):
            if len(update.new):
                live.length += len(update.new)
                self._shared.note_change(self._shared[live.namespace])
                self._warn_if_cut(live)
        return steps["nodes"].tolist()  # type: ignore[no-any-return]

    def _warn_if_cut(self, live: _Live) -> None:
        if live.cursor.cut and not live.cut:
            live.cut = True
            log.warning("namespace %r is full of live requests: the rest of an output is not indexed", live.namespace)

    def _table(self, lives: Sequence[_Live], updates: Sequence[TextUpdate]) -> RecordArray:
        rows, token, row = [], 0, 0
        for live, update in zip(lives, updates, strict=True):
            if len(update.new):
                self._shared.open(live.namespace)
            new = token + len(update.new)
            pending, end = new + len(update.pending), row + len(update.lists.at)
            text = live.length, live.room, token, new - update.untaught, new, pending
            limits = row, end, max(update.budget, 0), update.max_depth, 0, 0
            rows.append((*self._addresses(live), *(live.noise or NO_NOISE), update.least, *text, *limits))
            token, row = pending, end
        return np.array(rows, TEXT_STEP)

    def _supply(self, live: _Live, needs: int, text: np.record) -> None:
        if needs & entry_points.OWN_ROOM:
            while live.room < live.own.tokens + text.new_end - text.at:
                live.own, live.room = live.own.grown(), 2 * live.room
            text.room = live.room
            return
        if needs & entry_points.OWN_HINTS:
            live.own = live.own.with_hints()
        if needs & entry_points.SHARED_ROOM:
            self._shared[live.namespace].make_room(text.piece)

    def extend(self, request_id: int, tokens: Tokens) -> None:
        """Index generated ``tokens``, and train the mixer on them."""
        self.step([TextUpdate(request_id, tokens)])

    def recycle(self, request_id: int, rows: RecycledRows) -> None:
        """Store top tokens of rows of logits for drafts in the namespace; raise ValueError if array lengths differ."""
        self.step([TextUpdate(request_id, lists=RowsToKeep(np.zeros(len(rows.last), np.int64), rows))])

    def retrieve(self, request_id: int, budget: int, max_depth: int, pending: Tokens = (), least: float = 0.0) -> Draft:
        """Draft what may follow the request's sequence and ``pending`` tokens, which ``extend`` has not received: up to
        ``budget`` nodes, at most ``max_depth`` deep, of at least the probability ``least``."""
        return self.step([TextUpdate(request_id, pending=pending, budget=budget, max_depth=max_depth, least=least)])[0]

    def known_suffixes(self, texts: Sequence[tuple[int, IntArray]]) -> list[int]:
        """Return the length of each sequence's longest suffix seen before: a cheap estimate of what a draft promises.

        Args:
            texts: live requests with all their tokens, int64 ``[n]``; ``extend`` need not have received the last ones.

        Returns:
            At most ``MAX_AGREED`` each; 0 if the last ``SHORT_NGRAM`` tokens are new or the prompt is not indexed yet.
        """
        with self.lock:
            return [self._known_suffix(self._of(request_id), tokens) for request_id, tokens in texts]

    def _known_suffix(self, live: _Live, tokens: IntArray) -> int:
        if live.unindexed:
            return 0
        own, shared, cursor, _ = self._addresses(live)
        scratch = self._handles[1].at(self._scratch)
        return int(entry_points.known_suffix(own, shared, cursor, scratch, tokens[live.length :]))

    def _addresses(self, live: _Live) -> tuple[int, int, int, int]:
        (own, cursor), space = live.handles, self._shared[live.namespace]
        shared, mixer = space.handles
        return own.at(live.own), shared.at(space.index), cursor.at(live.cursor), mixer.at(space.mixer)

    @locked
    def finish(self, request_id: int) -> None:
        """Drop the request and its prompt; its output stays in the namespace. Unknown requests are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._shared.open(live.namespace).close(request_id)

    @property
    @locked
    def nbytes(self) -> int:
        return self._shared.nbytes + sum(live.own.nbytes for live in self._live.values())

    def length(self, request_id: int) -> int:
        """Return the number of tokens of a live request, prompt included."""
        return self._of(request_id).length

    def _of(self, request_id: int) -> _Live:
        live = self._live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not live; call begin first")
        return live
