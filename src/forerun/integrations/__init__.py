"""Forerun's trie in other engines. Nothing here imports torch or transformers: the engines pin their versions."""
