"""One layer without a model: each token has its query, key and value, which turn with position; for tests of caches."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.cache import Cache
from forerun.kv.streaming import LayerRotation, Rotation

VOCABULARY, HEADS, KV_HEADS, SIZE = 40, 4, 2, 8
ROTATION = Rotation({0: LayerRotation(slice(0, 3), slice(3, 6), torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64))})
_generator = torch.Generator().manual_seed(5)
QUERIES, KEYS, VALUES = (
    torch.randn(1, h, VOCABULARY, SIZE, generator=_generator, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)
)


def turned(raw: torch.Tensor, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Rows of a table, each at its position."""
    rows = [ROTATION(0, raw[:, :, [token]], int(p)) for token, p in zip(tokens, positions, strict=True)]
    return torch.cat(rows, 2) if rows else raw[:, :, :0]


def feed(cache: Cache, block: Block, spec: AttentionSpec) -> torch.Tensor:
    """What a model's layer would do in a pass, ``[1, H, n, d]``."""
    tokens, positions = block.tokens.tolist(), (cache.position + block.offsets).tolist()
    q, k = turned(QUERIES, tokens, positions), turned(KEYS, tokens, positions)
    return cache.attend(0, q, k, VALUES[:, :, tokens], block, spec)


def softmax_weights(q: torch.Tensor, k: torch.Tensor, seen: np.ndarray, spec: AttentionSpec) -> torch.Tensor:
    """By definition, ``[1, H, n, m]``, with the keys marked in ``seen`` ``[n, m]``."""
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores.masked_fill(torch.from_numpy(~seen), -torch.inf).softmax(-1)


def chain(tokens: Sequence[int], start: int) -> Block:
    return Block(np.array(tokens), DraftTree.empty(), start)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root to ``node`` (none for -1)."""
    return tree.ancestors[node].nonzero()[0].tolist() if node >= 0 else []


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> DraftTree:
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = [draw(st.integers(0, VOCABULARY - 1)) for _ in range(n)]
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))


@st.composite
def steps(draw: st.DrawFn, slack: int) -> tuple[Sequence[int], DraftTree, int, list[int], int]:
    """Pending tokens, a tree, the accepted node (-1 for none), drafts committed one by one, how many are kept."""
    token = st.integers(0, VOCABULARY - 1)
    pending = draw(st.lists(token, min_size=1, max_size=draw(st.sampled_from([1, 4, 20]))))
    tree = draw(trees())
    drafts = draw(st.lists(token, max_size=slack))
    return pending, tree, draw(st.integers(-1, len(tree) - 1)), drafts, draw(st.integers(0, len(drafts)))
