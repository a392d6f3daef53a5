"""What kernels run on: addresses, threads, and the executor of a pass."""
