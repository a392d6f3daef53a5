"""Benchmarks: how good drafts are, and how fast generation is."""
