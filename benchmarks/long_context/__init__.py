"""Decoding after a long prompt that is prefilled once."""
