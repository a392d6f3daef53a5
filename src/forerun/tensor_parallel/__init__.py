"""Tensor parallelism: one model in several processes, each with a part of every layer and of every cache.

Rank 0 decides. It runs the engine as if the model were whole: it drafts, samples, and plans by its clock. The other
ranks follow: before each pass rank 0 sends them one small message with the changes of caches since the last pass, and
the tokens that the pass reads (``rank_mirror.py``). So the ranks always agree about the generated text.
"""
