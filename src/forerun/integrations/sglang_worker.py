"""Draft trees for SGLang's ``NGRAMWorker``, which verifies them; requests and logits are indexed.

Written against SGLang 0.5.23, whose kernel derives positions and the links for verification from the ancestor masks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from forerun.core.tree import IntArray
from forerun.integrations.branch_drafter import BranchDrafter
from forerun.integrations.draft_settings import DraftSettings
from forerun.integrations.row_texts import RowText
from forerun.integrations.verified_tree import BoolArray, VerifiedTree
from forerun.trie.recycled import RecycledRows
from forerun.trie.tables import LISTED

SETTINGS_VARIABLE = "FORERUN_SGLANG"
"""Environment variable with the settings as JSON; SGLang's arguments have no place for a plug-in's."""


class ForerunWorker(NGRAMWorker):  # type: ignore[misc]  # the engine may be missing where types are checked
    """A worker that drafts the likeliest tree per row, with ``speculative_num_draft_tokens`` nodes, and indexes all
    rows.

    For their recognition, see ``FollowedTexts``. Prompts stay private to their request. All requests share outputs, and
    the top tokens at each tree node, unless ``share`` is false. With tensor parallelism no logits are kept: ranks must
    draft alike, but may order equal logits differently. Raises ValueError for pipeline parallelism, and as
    ``BranchDrafter``.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        parallel, model = get_parallel(), target_worker.model_runner.model_config
        if parallel.pp_size > 1:
            raise ValueError(f"pp_size is {parallel.pp_size}; allowed: 1, as a step must show all running requests")
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        settings = DraftSettings.from_values(_values(), vocabulary=str(model.model_path), least_probability=0.0)
        self._drafter = BranchDrafter(settings, saves=parallel.tp_rank == 0)
        self._vocabulary, self._keeps_logits = int(model.vocab_size), parallel.tp_size == 1
        self._lengths: dict[str, int] = {}
        self._prompts: dict[str, IntArray] = {}
        self._trees: list[VerifiedTree] = []
        self._best: Any = None

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        """Run a step; keep each verified node's top tokens on the device until the next step."""
        verifies = batch.forward_mode.is_decode()
        result = super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)
        if verifies and self._keeps_logits:
            self._best = result.logits_output.next_token_logits.float().topk(LISTED)
        return result

    def close(self) -> None:
        self._drafter.close()

    def _prepare_draft_tokens(self, batch: Any) -> tuple[IntArray, BoolArray]:
        """Draft a tree for each row: token ids ``[rows * nodes]``, ancestor masks ``[rows * nodes * nodes]``."""
        texts = self._texts(batch)
        lengths = {request.rid: len(text) for request, text in zip(batch.reqs, texts, strict=True)}
        rows = [RowText(text, self._new(rid, len(text))) for rid, text in zip(lengths, texts, strict=True)]
        most = [self.draft_token_num - 1] * len(rows)
        drafts = self._drafter.trees(rows, most, most, self._recycled())
        self._lengths = lengths
        self._trees = [
            VerifiedTree(text, draft, most[0] + 1, self._vocabulary) for text, draft in zip(texts, drafts, strict=True)
        ]
        tokens = np.concatenate([tree.tokens for tree in self._trees])
        return tokens, np.concatenate([tree.mask().ravel() for tree in self._trees])

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Leave SGLang's own corpus empty."""

    def _texts(self, batch: Any) -> list[IntArray]:
        """Return each row's tokens, including the last step's, which the requests lack with overlapped scheduling.
        Prompts are lists, which cost milliseconds to convert, so each is converted once."""
        came: list[Sequence[int]] = [()] * len(batch.reqs)
        if self.enable_overlap and not batch.grammar_needs_sync():
            tokens = batch.spec_info.accept_tokens.cpu().numpy().reshape(len(batch.reqs), self.draft_token_num)
            counts = batch.spec_info.accept_lens.cpu().numpy()
            came = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        known = self._prompts
        self._prompts = {
            each.rid: known[each.rid] if each.rid in known else np.array(each.origin_input_ids_unpadded, np.int64)
            for each in batch.reqs
        }
        return [
            np.concatenate([self._prompts[each.rid], *(np.asarray(part, np.int64) for part in (each.output_ids, new))])
            for each, new in zip(batch.reqs, came, strict=True)
        ]

    def _new(self, rid: str, length: int) -> int:
        """Count the new tokens since the last step; 1 for a request that starts or resumes."""
        return max(length - self._lengths.get(rid, length - 1), 0)

    def _recycled(self) -> list[RecycledRows]:
        """Return the top tokens of the last step's logits, by row of that step."""
        if self._best is None:
            return []
        (scores, tokens), self._best = (each.cpu().numpy() for each in self._best), None
        size = self.draft_token_num
        return [
            tree.recycled(tokens[row * size : (row + 1) * size], scores[row * size : (row + 1) * size])
            for row, tree in enumerate(self._trees)
        ]


def _values() -> object:
    text = os.environ.get(SETTINGS_VARIABLE, "{}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{SETTINGS_VARIABLE} is {text!r}; allowed: an object of JSON") from error
