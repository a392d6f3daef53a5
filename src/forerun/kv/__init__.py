"""KV caches, one per file."""
