"""Forerun's index in other engines. Nothing here imports torch or transformers, whose versions the engines pin."""
