"""Forward passes: a transformers decoder as a scorer of trees, as it is or compiled."""
