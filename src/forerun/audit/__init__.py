"""Checks whether drafts changed a text, and why."""
