"""Baselines of the papers, one file each: built only on Forerun's public classes, and measured by the benchmarks."""
