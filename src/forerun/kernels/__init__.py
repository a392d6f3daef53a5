"""Kernels of our own, where those that come with torch leave much of the machine idle."""
