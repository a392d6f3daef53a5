"""What every part speaks of: requests, trees, blocks, sampling, verification."""
