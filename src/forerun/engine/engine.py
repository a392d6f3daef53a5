"""The public interface: prompts in, outputs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from forerun.core.checks import check_integer
from forerun.core.compile_notice import compile_notice
from forerun.core.fairness import FairLock
from forerun.core.long_context import LongContextConfig, check_settings
from forerun.core.request import Request
from forerun.decoding.level import Level
from forerun.decoding.recipes import Setup, trie_of
from forerun.engine.arguments import (
    Drafts,
    admitted,
    check_drafts,
    check_model,
    check_tokenizer,
    level_of,
    open_store,
    tiers_of,
    warm_up_sources,
)
from forerun.engine.batch import Batch
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.engine.prefix_sharing import SHARED_CHUNK_TOKENS, PrefixCache, PrefixSharing
from forerun.engine.request_builder import RequestBuilder
from forerun.engine.result import Commit, GenerationInterrupted, GenerationResult, feed, with_texts
from forerun.engine.step import DecodingStep, StepSeconds
from forerun.kernels.attention.attention import warm_up
from forerun.kernels.runtime.thread_cap import cap_threads
from forerun.kv.cache import READ_BLOCK
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import dtype_name
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.prefill import Progress, counting, read_prompt
from forerun.models.forward.runtime import Runtime, default_runtime
from forerun.models.forward.scorer import is_sharded
from forerun.models.text.prompts import Prompts, encode, vocabulary_of
from forerun.models.text.requests import GenerationOptions, padding

if TYPE_CHECKING:
    from forerun.kv.kv_tiers import DeviceReserve, KVMemory
    from forerun.models.text.grammar import Grammars

BUDGET = 64


class Engine:
    """A target model and its drafter, whose index lasts as long as the engine.

    Threads may share an engine: their steps take turns, and each output is what it would be alone. Several engines may
    share a model, which may also run its own ``generate``. Not to be shared: an iterator (``stream``, ``run``), a
    request, a cache, a streamer, and a drafter object between engines; a ``Trie`` may be.

    The model (weights, mode, adapters) must not change while a request runs. Changes between requests are noticed when
    the next one starts, and drop cached keys and values; for exceptions see ``weights_changed``.

    Args:
        model: a transformers decoder; it decides what is generated.
        drafter: proposes trees: a name from ``forerun.decoding.recipes``, a source, or a function that makes one from a
            ``Setup``, such as a ``Level`` over your own cache.
        settings: for a drafter named by a string.
        tokenizer: for prompts and results as text, and for ``stop_strings``.
        budget: maximum number of nodes of a tree (the Lookahead paper's decoding length).
        prune_drafts: score only the part of a draft that pays, given the cost of passes, measured once per model. If
            false, score all of it. ``auto`` always prunes.
        prefill_block: prompt tokens in one pass.
        prefix_cache: maximum bytes of keys and values kept for later prompts with the same prefix.
        kv_store: a folder to keep them on disk, for later processes too; for a model on the CPU.
        kv_store_limit, kv_store_expiry, kv_store_key: maximum bytes on disk, seconds until unused prefixes are removed,
            and a key for the files' checksums; see ``KVStore``.
        kv_memory: maximum bytes of keys and values on the device, or a ``KVMemory``; the rest is offloaded.
        kv_dtype: type of cached keys and values: ``auto``, the model's, or ``bfloat16``, with half of the memory for a
            model in float32 or with quantised weights, on a CPU. All passes round alike, so drafts still change no bit.

    Raises:
        UnsupportedModelError: if the model's output could change.
        ValueError: for an invalid setting, a tokenizer with more tokens than the model, or a model whose keys and
            values cannot be stored on disk.
        TypeError: for a model that is not loaded, an invalid drafter, or another argument of the wrong type.
        OSError: if the store's folder cannot be created or written.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafts = "auto",
        *,
        settings: LongContextConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int = BUDGET,
        prune_drafts: bool = True,
        prefill_block: int = READ_BLOCK,
        prefix_cache: int = 0,
        kv_store: str | Path | None = None,
        kv_store_limit: int | None = None,
        kv_store_expiry: float | None = None,
        kv_store_key: bytes | None = None,
        kv_memory: int | KVMemory | None = None,
        kv_dtype: str = "auto",
        _runtime: Runtime | None = None,
    ) -> None:
        compile_notice()
        check_integer("budget", budget, 1)
        check_integer("prefill_block", prefill_block, 1)
        check_integer("prefix_cache", prefix_cache, 0)
        check_settings(settings)
        check_model(model)
        check_drafts(drafter)
        cap_threads()
        self.prefixes = PrefixCache(prefix_cache)
        self._runtime = _runtime or default_runtime()
        self.target = admitted(model, self._runtime.self_test, kv_dtype, kv_store=kv_store, kv_memory=kv_memory)
        self.exactness = self._runtime.exactness(self.target, position_limit(model), kv_memory is not None)
        """``level`` is ``bitwise`` if drafts and batches change no bit, else ``rounding``, with a ``reason``."""
        check_tokenizer(tokenizer, self.target.vocabulary)
        store = {"limit": kv_store_limit, "expiry": kv_store_expiry, "key": kv_store_key}
        self._new_store = partial(open_store, kv_store, store, self._fingerprint)
        self._weights = self.target.refresh()
        self.store = self._new_store()
        self.tiers = None if kv_memory is None else tiers_of(kv_memory, self.target)
        """Where keys and values are placed, if ``kv_memory`` bounds them."""
        self.step_seconds = StepSeconds()
        self._tokenizer, self._lock = tokenizer, FairLock()
        self._builder = RequestBuilder(self.target.model, self.target.vocabulary)
        self._speller: PreTrainedTokenizerBase | None = tokenizer
        warm_up(self.target.device, self.target.model.dtype, self._runtime.waits_for_code)
        self.budget, self.prune_drafts, self.prefill_block = budget, prune_drafts, prefill_block
        self.set_drafter(drafter, settings)

    def __repr__(self) -> str:
        model = self.target.model
        return (
            f"Engine({type(model).__name__}, {model.num_parameters():,} parameters, {dtype_name(model)} on "
            f"{model.device}, drafter={self.drafter}, budget={self.budget}, "
            f"exactness={self.exactness.level!r})"
        )

    def _fingerprint(self) -> str:
        from forerun.models.forward.fingerprint import fingerprint  # imported only if used

        return fingerprint(self.target, self.exactness)

    def _refresh(self) -> int:
        """Check under the lock whether a model has changed; if so, drop the target's cached keys and values and update
        the store's fingerprint. Until that succeeds, nothing is generated: the next request tries again."""
        for source in self.level.planner.sources:
            if isinstance(source, Level) and source.helper:
                source.model.refresh()
        now = self.target.refresh()
        if now != self._weights:
            self.prefixes.clear()
            if self.store is not None:
                self.store.close()
                self.store = self._new_store()
            self._weights = now
        return now

    def model_version(self) -> int:
        """Check for changes of the model; return a number that changes with it."""
        with self._lock:
            return self._refresh()

    def weights_changed(self) -> None:
        """Drop cached keys and values after a change that the engine cannot see.

        These are single weights or rows written through ``.data``, a NumPy view, or another program, between requests.
        All other changes are noticed when a request starts: modules, adapters, hooks, settings and storage of weights;
        in-place operations that torch counts; and whatever changes a checksum over 64 pieces of 64 bytes of each weight
        (all of one under 16 KiB), spread over its rows and columns.
        """
        with self._lock:
            self.target.renew()
            self._refresh()

    def set_drafter(self, drafter: Drafts, settings: LongContextConfig | None = None) -> None:
        """Replace the drafter; for the arguments see the class. Raise ValueError if it does not fit the target,
        TypeError if it is not a drafter."""
        check_drafts(drafter)
        setup = Setup(settings or LongContextConfig(), self.target, self._runtime, self.prune_drafts)
        level = level_of(drafter, setup)
        self.target.led(lambda: warm_up_sources(level))
        self.level = level
        """The target with its sources; see ``decoding.level``."""
        self.drafter = drafter if isinstance(drafter, str) else type(drafter).__name__
        self._spell()

    def _cache(
        self, tokens: int, shareable: bool = False, releases: bool = False, reserve: DeviceReserve | None = None
    ) -> FullCache:
        """Return a cache (see ``FullCache``) that leaves ``reserve`` free on a bounded device."""
        if self.tiers is None:
            return self.target.adopt(FullCache(tokens, shareable, releases))
        return self.target.adopt(self.tiers.cache(tokens, shareable, releases, reserve))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Converts prompts and results, unless a call passes another."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is not self._tokenizer:
            self._tokenizer = self._speller = tokenizer
            self._spell()

    @property
    def grammars(self) -> Grammars:
        """Compiles ``response_format`` for the engine's tokenizer; created on first use."""
        return self._builder.grammars(self._tokenizer)

    def _spell(self) -> None:
        if isinstance(self._speller, PreTrainedTokenizerFast):
            with suppress(ValueError):  # no trie, no spelling
                trie_of(self.level).spell(self._speller.backend_tokenizer)

    def generate(
        self,
        prompts: Prompts,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Continue one prompt or several, as one batch of ragged rows.

        Args:
            prompts: text, token ids, messages (dicts with ``role`` and ``content``, for the tokenizer's chat template),
                or a list of any of them; or a tensor ``[B, t]``, with ``attention_mask`` or as transformers infers it.
            streamer: a transformers streamer; for one sequence only.
            tokenizer: for this call; by default the engine's.
            budget: maximum nodes of a draft, if below the engine's; 0 for no drafts.
            options: see ``GenerationOptions``: those of ``model.generate``, and Forerun's; ValueError for an invalid
                one.

        Raises GenerationInterrupted on Ctrl-C, with the result so far.
        """
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        requests = self.requests(prompts, tokenizer=tokenizer, budget=budget, **options)
        result = GenerationResult(requests, padding(self.target.model, options), tokenizer)
        try:
            with closing(self.run(requests)) as commits:
                feed(streamer, requests, commits, torch.from_numpy(requests[0].prompt)[None])
        except KeyboardInterrupt:
            raise GenerationInterrupted(result) from None
        return result

    def stream(
        self,
        prompt: Prompts,
        on_prefill: Progress | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[Commit]:
        """Generate like ``generate``, yielding each step's commits with their text; closing the iterator cancels."""
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        commits = self.run(self.requests(prompt, tokenizer=tokenizer, budget=budget, **options), on_prefill)
        with closing(commits):
            yield from commits if tokenizer is None else with_texts(commits, tokenizer)

    def warm(self, texts: Sequence[Prompts], namespace: str = "default") -> None:
        """Index sequences as if the model had generated them in ``namespace``; raise ValueError without a trie."""
        rows = [row for text in texts for row in encode(text, self.tokenizer)]
        if rows:
            with self._lock:
                trie_of(self.level).warm(namespace, rows)

    def requests(
        self,
        prompts: Prompts,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Request]:
        """Return the checked requests that ``generate`` runs; options as there."""
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        built = self._builder.build(prompts, tokenizer, budget, options)
        if self._speller is None and tokenizer is not None:  # spelling changes drafts, never the output
            self._speller = tokenizer
            self._spell()
        return built

    def prefill(
        self,
        tokens: Sequence[int],
        room: int = 0,
        on_prefill: Progress | None = None,
        cache: FullCache | None = None,
    ) -> FullCache:
        """Prefill all tokens but the last, into a cache for ``run``.

        Args:
            room: further tokens that a new cache can hold without being copied.
            on_prefill: called with tokens done and to do.
            cache: one to continue, with the first of the tokens (ValueError: with all); by default a new one.
        """
        self.model_version()
        if cache is None:
            cache = self._cache(len(tokens) + room)
        if cache.length >= len(tokens):
            raise ValueError(f"the cache holds {cache.length} tokens; it may hold at most {len(tokens) - 1}")
        text = np.asarray(tokens, np.int64)[:-1]
        read_prompt(self.target, cache, text, self.prefill_block, counting(len(text) - cache.length, on_prefill))
        return cache

    def run(
        self,
        requests: Sequence[Request],
        on_prefill: Progress | None = None,
        caches: Sequence[FullCache] | None = None,
    ) -> Generator[Commit, None, None]:
        """Continue requests together until all have ended, yielding the commits of each step.

        Closing the iterator early leaves every request with the tokens committed so far.

        Args:
            on_prefill: called with prompt tokens done and to do.
            caches: one per request, which holds the first tokens of its prompt (none, up to all but the last) and then
                the output. Truncate it to continue the prompt again without a prefill. Its content must come from the
                current model; see ``model_version``.

        Raises:
            ValueError: if a cache holds the complete prompt.
            Exception: a request's error, after the others have ended; also ``Request.error``.
        """
        commits = self._run(requests, on_prefill, caches)
        if not is_sharded(self.target.model):
            return commits
        from forerun.engine.rank_sync import on_all_ranks  # only for a model in several processes

        return on_all_ranks(self.target, requests, commits)

    def _run(
        self, requests: Sequence[Request], on_prefill: Progress | None, caches: Sequence[FullCache] | None
    ) -> Generator[Commit, None, None]:
        each_cache = [None] * len(requests) if caches is None else caches
        with self.batch(closed=True) as batch:
            texts = deque(batch.tokens(each) for each, cache in zip(requests, each_cache, strict=True) if not cache)
            for request, cache in zip(requests, each_cache, strict=True):
                if cache is None:
                    texts.popleft()
                batch.admit(request, cache, None if self.tiers is None else self.tiers.room_for(texts))
            total = unread = batch.unread
            while batch:
                yield from batch.step()
                if on_prefill is not None and batch.unread < unread:
                    unread = batch.unread
                    on_prefill(total - unread, total)
        for request in requests:
            if request.error is not None:
                raise request.error

    def batch(
        self,
        limit: int | None = None,
        *,
        offloaded_chunks: int | None = None,
        pacing: PrefillPacing | None = None,
        closed: bool = False,
    ) -> Batch:
        """Return a batch whose requests come and go: ``admit``, ``step``, ``cancel``, ``close``.

        Args:
            limit: maximum tokens per step, besides drafts, at least 1; by default ``prefill_block``.
            offloaded_chunks, pacing: see ``Batch``.
            closed: whether no requests replace those that end: then drafts minimise the end of the last one, else they
                maximise tokens per second.
        """
        limit = self.prefill_block if limit is None else limit
        check_integer("limit", limit, 1)
        step = DecodingStep(self.level, self.budget, closed, self.step_seconds)
        fixed = self.target.prompt_chunk
        chunk, limit = (min(self.prefill_block, limit), limit) if fixed is None else (fixed, max(fixed, limit))
        anywhere = fixed is None and self.exactness.level == "bitwise"
        shared_chunk = min(SHARED_CHUNK_TOKENS, chunk) if anywhere else chunk
        alone = anywhere and not is_sharded(self.target.model)  # the other ranks do not repeat what an answer adds
        sharing = PrefixSharing(self.prefixes, lambda: self.store, shared_chunk, self._refresh, alone)
        free = None if self.tiers is None else self.tiers.free
        return Batch(step, self._lock, chunk, limit, sharing, self._cache, free, offloaded_chunks, pacing)

    def save_trie(self, path: str | Path) -> None:
        """Save the drafter's index to a file, replacing any existing one. Raise ValueError without a trie or a
        tokenizer, OSError if the file cannot be written."""
        trie_of(self.level).save(Path(path), self._vocabulary())

    def load_trie(self, path: str | Path) -> None:
        """Replace the drafter's index by one from ``save_trie``. Raise ValueError without a trie or a tokenizer, or if
        the file is damaged or of another tokenizer, OSError if it cannot be read."""
        trie_of(self.level).load(Path(path), self._vocabulary())

    @property
    def learned_bytes(self) -> int:
        """Bytes of the drafter's index, all namespaces together."""
        try:
            return trie_of(self.level).kept
        except ValueError:
            return 0

    def _vocabulary(self) -> str:
        if self._tokenizer is None:
            raise ValueError("the engine has no tokenizer, which identifies a trie file's tokens; pass one to Engine")
        return vocabulary_of(self._tokenizer)

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Write everything to the store, and keep nothing more; a program that ends without ``close`` does so too. If
        new prefixes were stored, hash all weights again, and remove these prefixes if the weights have changed since
        the store was opened."""
        if self.store is not None:
            with self._lock:
                same = self.target.refresh() == self._weights
            self.store.close(self._fingerprint if same else None)
        if self.tiers is not None:
            self.tiers.close()
