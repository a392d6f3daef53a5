"""The contract of a KV cache: one row of a batch, over one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention import AttentionSpec

READ_BLOCK = 512
"""Tokens of a prompt that are read in one pass, at most."""


@dataclass(frozen=True)
class LayerShape:
    """One layer's keys and values of a token.

    Attributes:
        heads: KV heads.
        dim, out_dim: numbers of a head's key, and of its value.
        width: bytes of a number.
    """

    heads: int
    dim: int
    out_dim: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of a token's key and value."""
        return self.heads * (self.dim + self.out_dim) * self.width


@dataclass(frozen=True)
class KVShape:
    """A model's keys and values of a token, by layer; layers that share those of another have none."""

    layers: Mapping[int, LayerShape]

    @property
    def nbytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(layer.nbytes for layer in self.layers.values())


class Cache(ABC):
    """Keys and values of one row's committed tokens, and its attention over them.

    A forward pass calls ``attend`` once per layer, which also keeps the block's keys and values as a speculative tail;
    ``commit`` then keeps the accepted part of the tail and drops the rest. Without it a pass leaves no trace.
    """

    length: int
    """Committed tokens."""

    def positions(self, block: Block) -> IntArray:
        """The position that the model is told of each token of the block: its place in the text, unless a cache
        numbers tokens anew."""
        return block.positions

    @abstractmethod
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attention of the block's queries over the committed tokens and, by its mask, over the block itself.

        Args:
            layer: index of the layer.
            q: queries with their position encoded, ``[1, H, n, d]``.
            k, v: the block's keys (with their position) and values, ``[1, Hkv, n, d]``.
            block: ``block.start`` equals ``length``.
            spec: what the layer asks for.

        Returns:
            ``[1, H, n, dv]``.
        """

    def next_read(self, goal: int) -> int:
        """How many tokens to read next on the way to a length of ``goal``; a cache may skip some that it would forget.

        Returns:
            At least 1 where ``length < goal``; the tokens are those from ``length`` on, which skipping has moved.
        """
        return goal - self.length

    @abstractmethod
    def commit(self, block: Block, path: Sequence[int]) -> None:
        """Keep the block's pending tokens and the tree nodes of ``path``."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the committed tokens from ``length`` on."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    def needs(self, shape: KVShape, tokens: int) -> int:
        """Bytes that it holds at most until a text has so many tokens: known before it holds any.

        Args:
            shape: of the model that it is for.
            tokens: of the text at its longest, drafts included.
        """
        return shape.nbytes * tokens
