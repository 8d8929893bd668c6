"""Benchmarks of tensor, sequence, expert and pipeline parallelism."""
