"""Benchmarks of memory and time of long sequences."""
