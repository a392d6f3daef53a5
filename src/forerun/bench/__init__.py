"""Measurement: what drafts are worth, and what generation takes."""
