"""Kernels of recurrent layers, in which a token's state follows from its parent's in the draft tree."""
