"""Forward passes: a transformers decoder as a scorer of draft trees, plain or compiled."""
