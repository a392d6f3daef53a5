"""Sources that propose by themselves: a trie, a prompt lookup, a trained head."""
