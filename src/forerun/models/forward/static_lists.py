"""Static lists: likely next tokens after the beginning of a sequence and one token.

For a new sequence they replace recycled logits (``trie/recycled.py``). Training a tokenizer adds frequent tokens first,
so each of the vocabulary's first tokens has a list. No user data is involved. Each start adds what fits in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.trie.recycled import NO_ROWS, RecycledRows
from forerun.trie.tables import LISTED

LISTED_TOKENS = 2048
"""Tokens with a list. With SmolLM2 they are 72 to 83 % of three sets of answers; twice as many are 80 to 87 %."""
PASS_TOKENS = 16
"""Lists per pass."""
MAKING_SECONDS = 1.0
"""Time after which no other pass starts."""


@torch.inference_mode()
def extended(
    scorer: Scorer, known: RecycledRows = NO_ROWS, clock: Callable[[], float] = time.perf_counter
) -> RecycledRows:
    """Extend the static lists of the vocabulary's first tokens for ``MAKING_SECONDS``; ``clock`` returns seconds."""
    root, count = _root(scorer.model), min(LISTED_TOKENS, scorer.vocabulary)
    end = clock() + MAKING_SECONDS
    parts = [known]
    done = len(known.last)
    while root is not None and done < count and clock() < end:
        parts.append(_lists(scorer, root, np.arange(done, min(done + PASS_TOKENS, count))))
        done += len(parts[-1].last)
    return RecycledRows(*map(np.concatenate, zip(*parts, strict=True)))


def _root(model: PreTrainedModel) -> int | None:
    """Return the beginning-of-sequence token, or else an end-of-sequence one, or None."""
    config = model.generation_config
    ends = config.eos_token_id
    found = [config.bos_token_id, *(ends if isinstance(ends, list) else [ends])]
    return next((token for token in found if token is not None), None)


def _lists(scorer: Scorer, root: int, tokens: IntArray) -> RecycledRows:
    """Make the lists of some tokens in one pass: the tokens are the leaves of a tree."""
    block = Block(np.array([root]), DraftTree(tokens, np.full(len(tokens), ROOT)), 0)
    logits = scorer.score([block], [FullCache(len(block))])[0][1:].float()
    scores, best = (part.cpu().numpy() for part in logits.topk(min(LISTED, logits.shape[-1])))
    missing = ((0, 0), (0, LISTED - best.shape[1]))
    scores = np.pad(scores, missing, constant_values=-np.inf)
    best = np.pad(best.astype(np.int32), missing, constant_values=-1)
    best[~np.isfinite(scores[:, 0])] = -1  # the model returned no numbers
    return RecycledRows(np.full(len(best), -1), tokens, best, np.where(best < 0, -np.inf, scores))


def content(rows: RecycledRows) -> bytes:
    """Serialise lists: int32 ``[n, 2 LISTED]``, each row the tokens and the bits of their logits."""
    file = BytesIO()
    np.save(file, np.concatenate((rows.tokens, rows.scores.view(np.int32)), 1), allow_pickle=False)
    return file.getvalue()


def read(file: Path, vocabulary: int) -> RecycledRows:
    """Read what ``content`` wrote; return no lists if the file is missing or damaged."""
    try:
        table = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return NO_ROWS
    if table.dtype != np.int32 or table.ndim != 2 or table.shape[1] != 2 * LISTED:
        return NO_ROWS
    tokens, scores = (np.ascontiguousarray(part) for part in np.split(table, 2, 1))
    scores = scores.view(np.float32)
    falling = (scores[:, 1:] <= scores[:, :-1]).all() and (np.isfinite(scores[:, 0]) | (tokens[:, 0] < 0)).all()
    if not falling or not ((tokens >= -1) & (tokens < vocabulary)).all():
        return NO_ROWS
    return RecycledRows(np.full(len(table), -1), np.arange(len(table)), tokens, scores)
