"""Every table of the index, and what its columns are called.

A table is a numpy array of records, like an array of C structs: ``table[row].column`` reads and writes a column, in
compiled code and in plain Python alike. Compiled, it is one load or store, as with a numbered column. In Python a row
costs a microsecond or two and ``table["column"]`` a tenth of that, so code that runs at every step takes the latter.

Conventions: 0 is "none" in every link and position, so row 0 of ``slots``, ``blocks`` and ``text`` is never used. A
*source* is one of two texts, ``OWN`` (the request's own) or ``SHARED`` (its namespace's). A gapped *match* is either
the ``PROMPT_MATCH`` or the ``OUTPUT_MATCH``. ``docs/trie.md`` fills these tables step by step from one short text.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

RecordArray = npt.NDArray[np.record]

OWN, SHARED = range(2)
"""Sources."""

PROMPT_MATCH, OUTPUT_MATCH = range(2)
"""Gapped matches."""

CHUNK_TOKENS = 32
"""Tokens of one row of ``Index.text``."""


def _records(*columns: str | tuple[Any, ...]) -> np.dtype[np.record]:
    """The type of a table with these columns, in order; in its rows they are attributes. A string names int64 columns,
    separated by spaces."""
    fields = list[tuple[Any, ...]]()
    for each in columns:
        fields += [(name, np.int64) for name in each.split()] if isinstance(each, str) else [each]
    return _of(np.dtype(fields, align=True))


def _of(columns: np.dtype[np.void]) -> np.dtype[np.record]:
    taken = [name for name in columns.names or () if hasattr(np.record, name)]
    if taken:  # in plain Python it would be that attribute
        raise ValueError(f"columns are called {taken}; numpy's records have attributes of that name")
    return cast("np.dtype[np.record]", np.dtype((np.record, columns)))


SLOT = _records(("key", np.int32), ("chain", np.int32), ("total", np.int32), ("value", np.int32))
"""``Index.slots``: one context.

- ``key``: 31 bits of the hash of its tokens.
- ``chain``: the next slot of the same bucket; of a free slot, the next free one.
- ``total``: how often anything followed it.
- ``value``: the token that followed it, while there is only one; otherwise -1 minus the first row of its block.
"""

_ENTRY: Any = {
    "names": ["token", "count", "followers", "last", "free"],
    "formats": [np.int32] * 5,
    "offsets": [0, 4, 0, 4, 4],
}

ENTRY = _of(np.dtype(_ENTRY, align=True))
"""``Index.blocks``: the followers of a context that has several. A block is a header row and one row for each follower.

- ``token``, ``count``: of a follower, and how often it followed.
- ``followers``: of a header, how many there are.
- ``last``: of a header, which of them came last, from 1; 0 if that one is gone.
- ``free``: of a block that is free, the next free block of the same size.

A row is a header or a follower. So ``followers`` shares its memory with ``token``; ``last`` and ``free`` share theirs
with ``count``.
"""

TEXT_CHUNK = _records(("tokens", np.int32, (CHUNK_TOKENS,)), ("after", np.int32), ("before", np.int32))
"""``Index.text``: a chunk of a text.

- ``tokens``: -1 where none is written.
- ``after``: the next chunk of the same text; of a free chunk, the next free one.
- ``before``: the chunk before it in its text.
"""

INDEX_STATE = _records("mask split slots slot_top slot_free rows block_top chunks chunk_top chunk_free tokens lists")
"""``Index.state``: one row of counters.

- ``mask``, ``split``: of the hash table (linear hashing). It has ``mask + 1 + split`` buckets, of which the first
  ``split`` are split already.
- ``slots``, ``rows``, ``chunks``: how many slots, rows of blocks and chunks are in use.
- ``slot_top``, ``block_top``, ``chunk_top``: the first of each that was never used.
- ``slot_free``, ``chunk_free``: the first slot and the first chunk that was given back.
- ``tokens``: how many tokens are written.
- ``lists``: how many lists of recycled logits are written.
"""

LISTED = 8
"""Tokens of one list of recycled logits."""

CHANCE_CLASSES = 14
"""Classes of a chance, by its log-odds."""

RECYCLED_LIST = _records(
    ("key", np.uint64),
    ("tokens", np.int32, (LISTED,)),
    ("chances", np.float32, (LISTED,)),
    ("classes", np.int8, (LISTED,)),
)
"""``Index.recycled``: the best tokens behind one context, best first.

- ``key``: the hash of the context; 0 of a free row.
- ``tokens``: -1 where there are fewer.
- ``chances``: the share of each in the sum of all ``LISTED``.
- ``classes``: the classes of these, of ``CHANCE_CLASSES``.
"""

COPY = _records("position agreed wrong")
"""``TextCursor.copies``: where the text seems to repeat an earlier passage. It is the match model of the PAQ
compressors.

- ``position``: of the token that the copy predicts next.
- ``agreed``: how many tokens before it are the text's last ones.
- ``wrong``: the last eight predictions, one bit each, set where the copy was wrong; the latest is bit 0.
"""

GAPPED_MATCH = _records("position resumed gap run prompt_end spelled")
"""``TextCursor.matches``: where the text repeats an earlier passage, with tokens of its own in between.

- ``position``: of the token that the match predicts first.
- ``resumed``: how often two tokens in a row were as predicted, behind a gap. A single one counts against it: that was
  chance.
- ``gap``: tokens since the match was last followed; 0 while it is being followed.
- ``run``: tokens in a row that were as predicted.
- ``prompt_end``: position of the prompt's last token. One match stays before it, the other behind it.
- ``spelled``: how many tokens of the spelling of the word at ``position`` have come; see ``spelling``.
"""

TEXT_END = _records("position chunk")
"""``TextCursor.ends``: position of the text's last token (-1: it is no longer written), and the text's first chunk."""

CANDIDATE = _records(
    "token",
    ("longest", np.int64, (2,)),
    "match_class listed",
    ("noise", np.float64),
    "weights",
    ("odds", np.float64),
    ("chance", np.float64),
)
"""``CandidateTable.candidates``: a token that may come next.

- ``longest``: tokens of the longest context that it followed, in each source.
- ``match_class``: 1 if a match predicts it or what usually stands in for it, 2 if the match is sure, otherwise 0.
- ``listed``: tokens of the longest context whose list of recycled logits has it; 0 for none.
- ``noise``: see ``evidence.noise_of``; 0 where it is not known.
- ``weights``: which row of ``Mixer.weights`` its evidence is mixed with.
- ``odds``: the log-odds that the mix gives.
- ``chance``: the probability after the correction.
"""

ABSENT = _records(("shorter", np.int32), ("unknown", np.int32), ("rare", np.int32))
"""``PositionEvidence.absent``: the cell of a context for a candidate that is not among what was read of its followers.

- ``shorter``: the candidate followed the context that is one token shorter.
- ``unknown``: it did not follow that one either.
- ``rare``: it followed this context, but too rarely to be read.
"""

PREDICTION = _records("token cell agreed")
"""``PositionEvidence.copies``: the token that a copy predicts, the cell for all other tokens (the next cell is for
this one), and ``COPY.agreed``."""

NOISE = _records(("seed", np.uint64), "position", ("temperature", np.float64))
"""``DraftWorkspace.noise``: what the noise of a text's next tokens follows from; see ``evidence.noise_of``.

- ``seed``: the sampler's, mixed once.
- ``position``: of the next token in the text.
- ``temperature``: 0 where noise is not known, or there is none.
"""

TEXT_STEP = _records(
    "own shared cursor mixer",
    ("seed", np.uint64),
    ("temperature", np.float64),
    "position room at taught_end new_end pending_end list_at list_end budget max_depth piece nodes",
)
"""What one compiled call does for one text: learn new tokens, keep lists of recycled logits, then draft.

- ``own``, ``shared``, ``cursor``, ``mixer``: addresses; see ``array_handles``.
- ``seed``, ``temperature``: of ``NOISE``.
- ``position``: of the next token in the text.
- ``room``: tokens that fit the own index.
- ``at``: the next token to learn, in the vector of all texts' tokens. Those before ``new_end`` are to be learned; those
  from there to ``pending_end`` are on trial. Evidence learns from those before ``taught_end``.
- ``list_at``, ``list_end``: its lists, in the table of all texts' lists.
- ``budget``, ``max_depth``: maximum number of nodes, and their maximum depth.
- ``piece``: tokens that were learned last.
- ``nodes``: how many were drafted.
"""

SPAN = _records("head tail")
"""``Frontier.span``: the frontier's entries are those from ``head`` to before ``tail``."""
