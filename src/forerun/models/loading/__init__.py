"""Load a model from a folder, a hub name or a GGUF file."""
