"""Models: any transformers decoder as a scorer of draft trees, and how it is loaded and checked."""
