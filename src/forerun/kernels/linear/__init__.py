"""Linear layers and row-wise operations with a fixed order of sums."""
