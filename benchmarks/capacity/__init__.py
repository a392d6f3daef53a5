"""Bytes and tokens per second of models and devices that are not there, by arithmetic."""
