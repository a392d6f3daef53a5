"""Attention in one fixed order of sums, and over the chunks that a query chooses."""
