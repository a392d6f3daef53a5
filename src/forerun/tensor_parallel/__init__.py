"""Tensor parallelism: one model in several processes, each with a part of every layer and cache.

Rank 0 runs the engine as if alone: it drafts, samples, and plans by its clock. Before each pass it sends the other
ranks one small message: all cache changes since the last pass, and the pass's tokens (``rank_mirror.py``).
"""
