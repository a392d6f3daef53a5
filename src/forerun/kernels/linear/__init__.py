"""Linear layers and row-wise operations in one fixed order of sums."""
