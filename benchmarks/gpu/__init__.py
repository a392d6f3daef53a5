"""Forerun on a GPU: what has to be measured the next time that one is there, in at most 345 seconds."""
