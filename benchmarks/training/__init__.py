"""The recipe that trains the bundled models."""
