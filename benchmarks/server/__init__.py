"""A server under load: ``forerun serve`` with and without drafts, and ``transformers serve``."""
