"""The index behind the trie drafter, in flat arrays and compiled functions."""
