"""The engine's public face: prompts in, texts out; in between one step after another until each text has ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.sampling import Method
from forerun.core.turns import Turns
from forerun.drafting.adaptive import AdaptiveDrafter
from forerun.drafting.drafter import Drafter
from forerun.drafting.recipes import build_drafter
from forerun.engine.batch import Batch
from forerun.engine.commit import Commit, feed
from forerun.engine.kv_store import KVStore
from forerun.engine.prefix_sharing import CHUNK, PrefixSharing
from forerun.engine.prefixes import PrefixCache
from forerun.engine.rank_sync import together
from forerun.engine.result import GenerationInterrupted, GenerationResult, ends, padding
from forerun.engine.step import Step, by_request
from forerun.kernels.runtime.warm_up import warm_up
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import KVMemory, Tiers
from forerun.models.forward.fingerprint import fingerprint
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.level import Progress, counting, read
from forerun.models.forward.runtime import Runtime, default_runtime
from forerun.models.text.grammar import Grammars, ResponseFormat
from forerun.models.text.prompts import Prompts, encode
from forerun.models.text.requests import RowOptions, build_requests
from forerun.tensor_parallel.ranks import admit

BUDGET = 64
"""Nodes of a tree, at most."""
PREFILL_BLOCK = 512
"""Prompt tokens in one pass."""


class Engine:
    """Continues texts with one target model and one drafter, whose memory lasts as long as the engine.

    Threads may share an engine: their steps take turns, and each text is what it would be alone. They may also have
    engines of their own on one model, beside its own ``generate``. Not to be shared are an iterator (``stream``,
    ``run``), a request, a cache, a streamer, and a drafter object between engines; a ``Trie`` may be. Nobody may change
    the model meanwhile: its weights, its mode, its adapters.

    Args:
        model: a transformers decoder; it decides what is generated.
        drafter: proposes the trees; a name from ``forerun.drafting.recipes`` or an object.
        settings: what a drafter given by name is built with.
        tokenizer: for prompts and results as text, and for ``stop_strings``.
        budget: the most nodes of a tree that may be accepted (the Lookahead paper's decoding length).
        prune_drafts: score the part of each draft that pays by the cost of passes, which is measured once for a model.
            If false, all of each draft is scored.
        prefill_block: prompt tokens in one pass.
        prefix_cache: maximum bytes of prompts' keys and values that are kept for later prompts that begin alike.
        kv_store: a folder in which they are kept on disk, for later processes too; for a model on the CPU.
        kv_store_limit: bytes on disk, at most; see ``KVStore``.
        kv_memory: bytes that keys and values may take on the device, or a ``KVMemory``; the rest is offloaded.

    Raises:
        UnsupportedModelError: if the model's output could change.
        ValueError: for a wrong setting, a tokenizer with more tokens than the model, or a model whose keys and values
            cannot be kept on disk.
        OSError: if the store's folder cannot be made or written.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | str = "auto",
        *,
        settings: LongContextConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int = BUDGET,
        prune_drafts: bool = True,
        prefill_block: int = PREFILL_BLOCK,
        prefix_cache: int = 0,
        kv_store: str | Path | None = None,
        kv_store_limit: int | None = None,
        kv_memory: int | KVMemory | None = None,
        _runtime: Runtime | None = None,
    ) -> None:
        for name, value in (("budget", budget), ("prefill_block", prefill_block)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.prefixes = PrefixCache(prefix_cache)
        """What is kept of prompts for later ones."""
        self._runtime = _runtime or default_runtime()
        self.target = admit(model, self._runtime.self_test, kv_store=kv_store, kv_memory=kv_memory)
        self.exactness = self._runtime.exactness(self.target, position_limit(model), kv_memory is not None)
        """``level`` is ``bitwise`` if every text is bit for bit the one without drafts, in batches too; else it is
        ``rounding``, and ``reason`` says why."""
        if tokenizer is not None and len(tokenizer) > self.target.vocabulary:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {self.target.vocabulary}: they do not match"
            )
        self.store = KVStore.of(kv_store, lambda: fingerprint(self.target, self.exactness), kv_store_limit)
        """What is kept of prompts on disk."""
        self.tiers = None if kv_memory is None else Tiers(kv_memory, self.target.device, self.target.kv, model.dtype)
        """Where keys and values lie, if they are bounded."""
        make: Callable[[int], FullCache] = FullCache if self.tiers is None else self.tiers.cache
        self._make: Callable[[int], FullCache] = lambda tokens: self.target.adopt(make(tokens))
        self._tokenizer, self._turns = tokenizer, Turns()
        self._grammars: Grammars | None = None
        warm_up(self.target.device, self.target.model.dtype)
        self.budget, self.prune_drafts, self.prefill_block = budget, prune_drafts, prefill_block
        self.set_drafter(build_drafter(drafter, settings) if isinstance(drafter, str) else drafter)

    def set_drafter(self, drafter: Drafter) -> None:
        """Draft with this drafter from now on.

        Raises:
            ValueError: if it does not fit the target.
        """
        if self.prune_drafts and not drafter.sized:
            drafter = AdaptiveDrafter(drafter, trees=drafter)
        self.target.led(lambda: self._bind(drafter))
        drafter.warm_up()
        self.drafter = drafter
        self._spell()

    def _bind(self, drafter: Drafter) -> None:
        drafter.bind(self.target, self._runtime)
        if self.prune_drafts and drafter.weighs:
            drafter.fit(self._runtime.costs(self.target))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """For prompts and results as text; the drafter is told of it."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._grammars = tokenizer, None
            self._spell()

    @property
    def grammars(self) -> Grammars:
        """What ``response_format`` is made of; made at first use."""
        if self._grammars is None:
            end = ends(self.target.model.generation_config)
            self._grammars = Grammars(self._tokenizer, self.target.vocabulary, end)
        return self._grammars

    def _spell(self) -> None:
        if isinstance(self._tokenizer, PreTrainedTokenizerFast):
            self.drafter.spell(self._tokenizer.backend_tokenizer)

    def generate(self, prompts: Prompts, *, streamer: BaseStreamer | None = None, **options: Any) -> GenerationResult:
        """Continue one prompt or several, as one batch of ragged rows.

        Args:
            prompts: text, token ids, messages (dicts with ``role`` and ``content``, for the tokenizer's chat template),
                or a list of any of them; or a tensor ``[B, t]`` with ``attention_mask``.
            streamer: a transformers streamer; for one sequence only.
            options: ``seed``, ``verification``, ``namespace``, ``drafts_from``, ``budget`` and ``logprobs`` (see
                ``RowOptions``), ``response_format`` (see ``Grammars``), and everything that ``model.generate`` takes:
                ``max_new_tokens``, ``do_sample``, ``temperature``, ``logits_processor``, ...

        Raises:
            GenerationInterrupted: on Ctrl-C, with the result so far.
        """
        requests = self.requests(prompts, **options)
        result = GenerationResult(requests, padding(self.target.model.generation_config), self.tokenizer)
        try:
            with closing(self.run(requests)) as commits:
                feed(streamer, requests, commits)
        except KeyboardInterrupt:
            raise GenerationInterrupted(result) from None
        return result

    def stream(self, prompt: Prompts, on_prefill: Progress | None = None, **options: Any) -> Iterator[Commit]:
        """Like ``generate``, yielding what each step commits; closing the iterator cancels."""
        yield from self.run(self.requests(prompt, **options), on_prefill)

    def warm(self, texts: Sequence[Prompts], namespace: str = "default") -> None:
        """Let the drafter learn from texts as if the model had generated them in ``namespace``.

        Raises:
            ValueError: for a drafter that keeps nothing from earlier texts.
        """
        rows = [row for text in texts for row in encode(text, self.tokenizer)]
        if rows:
            with self._turns:
                self.drafter.warm(namespace, rows)

    def requests(
        self,
        prompts: Prompts,
        *,
        attention_mask: torch.Tensor | None = None,
        seed: int | None = None,
        verification: Method = "coupled",
        namespace: str = "default",
        drafts_from: str | None = None,
        budget: int | None = None,
        logprobs: int | None = None,
        response_format: ResponseFormat | None = None,
        **options: Any,
    ) -> list[Request]:
        """The checked requests that ``generate`` runs; options as there."""
        grammar = None if response_format is None else self.grammars.of(response_format, namespace)
        row_options = RowOptions(seed, verification, namespace, budget, logprobs, grammar, drafts_from)
        rows = encode(prompts, self.tokenizer, attention_mask)
        built = [
            build_requests(self.target.model, prompt, row_options, self.tokenizer, row, len(rows), **options)
            for row, prompt in enumerate(rows)
        ]
        return [request for group in built for request in group]

    def prefill(self, tokens: Sequence[int], room: int = 0, on_prefill: Progress | None = None) -> FullCache:
        """Read tokens but for the last one, into a cache for ``run`` that has room for ``room`` more.

        Args:
            tokens: at least one.
            room: tokens that the cache can take up after them without being copied.
            on_prefill: called with tokens done and to do.
        """
        cache = self._make(len(tokens) + room)
        text = np.asarray(tokens, np.int64)[:-1]
        read(self.target, cache, text, self.prefill_block, counting(len(text), on_prefill))
        return cache

    @together
    def run(
        self,
        requests: Sequence[Request],
        on_prefill: Progress | None = None,
        caches: Sequence[FullCache] | None = None,
    ) -> Generator[Commit, None, None]:
        """Continue requests together until each has ended, yielding what each step commits.

        Closing the iterator early leaves every request with the tokens committed so far.

        Args:
            requests: fresh ones.
            on_prefill: called with prompt tokens done and to do.
            caches: one for each request, which holds the first tokens of its prompt (none, or all but the last) and
                goes on to hold what is generated. By truncating it afterwards, a text that was read once can be
                continued again.

        Raises:
            ValueError: if a cache holds as many tokens as the prompt has, or more.
            Exception: a request's own error, once the others have ended; it is ``Request.error``, too.
        """
        held = [None] * len(requests) if caches is None else caches
        with self.batch() as batch:
            texts = [batch.tokens(each) for each, cache in zip(requests, held, strict=True) if not cache]
            with nullcontext() if self.tiers is None else self.tiers.expecting(texts):
                for request, cache in zip(requests, held, strict=True):
                    batch.admit(request, cache)
            total = unread = batch.unread
            while batch:
                yield from batch.step()
                if on_prefill is not None and batch.unread < unread:
                    unread = batch.unread
                    on_prefill(total - unread, total)
        for request in requests:
            if request.error is not None:
                raise request.error

    def batch(self, limit: int | None = None) -> Batch:
        """Requests that come and go: ``admit`` them, ``step``, ``cancel``, ``close``.

        Args:
            limit: tokens of texts that a step reads, at most; see ``Batch``. By default as many as ``prefill_block``.

        Raises:
            ValueError: for a limit under 1.
        """
        limit = self.prefill_block if limit is None else limit
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        step, chunk = Step(self.target, by_request(self.drafter), self.budget), min(self.prefill_block, limit)
        kept = PrefixSharing(
            self.prefixes, self.store, min(CHUNK, chunk) if self.exactness.level == "bitwise" else chunk
        )
        return Batch(step, self._turns, chunk, limit, kept, self._make, None if self.tiers is None else self.tiers.free)

    def flush(self) -> None:
        """Wait until the store has all that it is to keep."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Write what the store is to keep, and keep nothing more. A program that ends without it waits for the same."""
        for each in (self.store, self.tiers):
            if each is not None:
                each.close()
