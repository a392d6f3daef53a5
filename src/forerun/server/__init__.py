"""Many clients at once: requests wait their turn, decode together, and end when their client goes."""
