"""Forerun's own kernels, where torch's are slower or round differently from pass to pass."""
