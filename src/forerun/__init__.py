"""Forerun: the same text, faster."""
