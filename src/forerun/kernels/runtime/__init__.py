"""The runtime of kernels: addresses, threads, and the executor of a pass."""
