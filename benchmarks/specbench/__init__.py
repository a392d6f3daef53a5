"""Spec-Bench, the common yardstick of speculative decoding: tokens a step and speed-up by category of questions."""
