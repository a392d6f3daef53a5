"""Spec-Bench, the common yardstick of speculative decoding: tokens per step and speed-up by category of questions."""
