"""Tensor parallelism: one model in several processes, each with a part of every layer and of every cache.

Rank 0 decides. It runs the engine as if the model were whole: it drafts, samples, and plans by its clock. The other
ranks follow: before each pass of the model rank 0 tells them, in one small message, what it did to caches since the
last one, and what the pass reads (``mirror.py``). So they can never disagree about what is generated.
"""
