"""Six tasks of a chat model, or continuations, with more contestants than ``forerun bench`` has."""
