"""Trained heads: small networks that draft for one target from its hidden states."""
