"""The index that the trie drafter drafts from, in flat arrays and compiled functions."""
