"""Other engines on the same weights. Each runs in its own process, so that thread pools do not disturb each other.

These processes run ``child`` and the module that it serves; neither imports torch or transformers.
"""
