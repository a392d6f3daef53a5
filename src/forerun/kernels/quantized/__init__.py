"""Linear layers over weights as a GGUF file stores them."""
