"""Audit any OpenAI-compatible server from outside, by its answers alone."""
