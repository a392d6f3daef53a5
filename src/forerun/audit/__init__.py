"""Checks whether drafts changed an output, and why."""
