"""Kernels of recurrent layers: a token's state is that of its parent in the draft tree and the token itself."""
