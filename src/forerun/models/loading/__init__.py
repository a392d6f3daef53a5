"""From a folder, a name or a GGUF file to a model."""
