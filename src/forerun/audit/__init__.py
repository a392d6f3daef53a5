"""Whether drafts changed a text, and if so why."""
