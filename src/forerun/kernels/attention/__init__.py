"""Attention in a fixed order of sums, and over chunks chosen per query."""
