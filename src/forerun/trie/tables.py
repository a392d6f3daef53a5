"""Every table of the index, and its columns; see ``core.records``.

Conventions: 0 is "none" in every link and position, so row 0 of ``slots``, ``blocks`` and ``text`` is unused. A
*source* is ``OWN`` (the request) or ``SHARED`` (its namespace); a gapped *match* is ``PROMPT_MATCH`` or
``OUTPUT_MATCH``. ``docs/trie.md`` fills these tables step by step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.core.records import named, records

OWN, SHARED = range(2)

PROMPT_MATCH, OUTPUT_MATCH = range(2)

CHUNK_TOKENS = 32


SLOT = records(("key", np.int32), ("chain", np.int32), ("total", np.int32), ("value", np.int32))
"""``Index.slots``: one context.

- ``key``: 31 bits of the hash of its tokens.
- ``chain``: the next slot of the bucket, or the next free one.
- ``total``: number of tokens counted after it.
- ``value``: its follower, while there is only one; otherwise -1 minus the first row of its block.
"""

_ENTRY: Any = {
    "names": ["token", "count", "followers", "last", "free"],
    "formats": [np.int32] * 5,
    "offsets": [0, 4, 0, 4, 4],
}

ENTRY = named(np.dtype(_ENTRY, align=True))
"""``Index.blocks``: a context's followers, if several: a header row, then one row per follower.

- ``token``, ``count``: a follower, and how often it followed.
- ``followers``: header: number of followers; shares memory with ``token``.
- ``last``: header: which of them came last, from 1; 0 if it is gone. Shares memory with ``count``.
- ``free``: free block: the next free block of this size. Shares memory with ``count``.
"""

TEXT_CHUNK = records(("tokens", np.int32, (CHUNK_TOKENS,)), ("after", np.int32), ("before", np.int32))
"""``Index.text``: a chunk of a sequence: tokens, padded with -1; next chunk (or next free one), previous one."""

INDEX_STATE = records("mask split slots slot_top slot_free rows block_top chunks chunk_top chunk_free tokens lists")
"""``Index.state``: one row of counters.

- ``mask``, ``split``: of linear hashing: ``mask + 1 + split`` buckets, the first ``split`` already split.
- ``slots``, ``rows``, ``chunks``: slots, block rows and chunks in use.
- ``slot_top``, ``block_top``, ``chunk_top``: the first never-used one of each.
- ``slot_free``, ``chunk_free``: heads of the free lists.
- ``tokens``, ``lists``: tokens and recycled lists written.
"""

LISTED = 8
"""Tokens per list of recycled logits."""

CHANCE_CLASSES = 14

RECYCLED_LIST = records(
    ("key", np.uint64),
    ("tokens", np.int32, (LISTED,)),
    ("chances", np.float32, (LISTED,)),
    ("classes", np.int8, (LISTED,)),
)
"""``Index.recycled``: the top tokens after one context, best first.

- ``key``: hash of the context; 0 if free.
- ``tokens``: padded with -1.
- ``chances``: softmax over the list, and its ``classes``.
"""

COPY = records("position agreed wrong")
"""``TextCursor.copies``: where the sequence seems to repeat an earlier passage, as in PAQ's match model.

- ``position``: of the token that the copy predicts next.
- ``agreed``: how many tokens before it equal the last ones of the sequence.
- ``wrong``: the last eight predictions, one bit each, set if wrong; bit 0 is the latest.
"""

GAPPED_MATCH = records("position resumed gap run prompt_end spelled")
"""``TextCursor.matches``: where the sequence repeats an earlier passage, with other tokens in between.

- ``position``: of the token that the match predicts first.
- ``resumed``: how often two predicted tokens in a row came after a gap. A single one is chance and counts against it.
- ``gap``: tokens since the match was last followed; 0 while it is.
- ``run``: predicted tokens in a row.
- ``prompt_end``: position of the prompt's last token, which separates the two matches.
- ``spelled``: tokens so far of the spelling of the word at ``position``.
"""

TEXT_END = records("position chunk")
"""``TextCursor.ends``: position of the last token (-1: no longer written), and first chunk."""

CANDIDATE = records(
    "token",
    ("longest", np.int64, (2,)),
    "match_class listed",
    ("noise", np.float64),
    "weights",
    ("odds", np.float64),
    ("chance", np.float64),
)
"""``CandidateTable.candidates``: a token that may come next.

- ``longest``: length of the longest context that it followed, per source.
- ``match_class``: 1 if a match or substitute predicts it, 2 if a confident match does, otherwise 0.
- ``listed``: length of the longest context whose recycled list has it; 0 for none.
- ``noise``: see ``evidence.noise_of``; 0 if unknown.
- ``weights``: its row of ``Mixer.weights``.
- ``odds``, ``chance``: mixed log-odds, and the probability after correction.
"""

ABSENT = records(("shorter", np.int32), ("unknown", np.int32), ("rare", np.int32))
"""``PositionEvidence.absent``: a context's cell for a candidate that is not among the followers read.

- ``shorter``: the candidate followed the context one token shorter.
- ``unknown``: it did not follow that one either.
- ``rare``: it followed this context, but too rarely to be read.
"""

PREDICTION = records("token cell agreed")
"""``PositionEvidence.copies``: a predicted token, the cell of all others (the next is its own), ``COPY.agreed``."""

NOISE = records(("seed", np.uint64), "position", ("temperature", np.float64))
"""``DraftWorkspace.noise``, the noise of the token at ``position`` (see ``evidence.noise_of``): the sampler's seed,
mixed once, and the temperature, 0 if noise is unknown or absent."""

TEXT_STEP = records(
    "own shared cursor mixer",
    ("seed", np.uint64),
    ("temperature", np.float64),
    ("least", np.float64),
    "position room at taught_end new_end pending_end list_at list_end budget max_depth piece nodes",
)
"""What one compiled call does for one sequence: index new tokens, store recycled logits, then draft.

- ``own``, ``shared``, ``cursor``, ``mixer``: addresses; see ``array_handles``.
- ``seed``, ``temperature``, ``position``: of ``NOISE``.
- ``least``, ``budget``, ``max_depth``: of the draft: minimum probability of nodes, their number, depth.
- ``room``: tokens that fit the request's index.
- ``at``: next token to index, in the vector of all tokens. New ones end before ``new_end``, tentative ones before
  ``pending_end``. The mixer trains on those before ``taught_end``.
- ``list_at``, ``list_end``: its lists, in the table of all lists.
- ``piece``, ``nodes``: tokens indexed last, and nodes drafted.
"""

SPAN = records("head tail")
"""``Frontier.span``: entries run from ``head`` to before ``tail``."""
