"""Other engines on the same weights, each in a process of its own, so that thread pools do not disturb each other.

What runs in those processes imports neither torch nor transformers: ``child`` and the modules it is told to serve.
"""
